/** The engine panel: load, tokens/s, and every block of the KV-cache pool as a cell. */

import { errorNote } from "./api.js";
import { drafting, holders, KINDS, live, rates, sum, watch } from "./live.js";
import { html, nothing } from "./vendor/lit-html-3.3.3.js";

const GAP = 1; // pixels between large cells
const MAP_HEIGHT = 420; // pixels
const LISTED = 12; // maximum sequences listed

let wanted = false;
let redraw = () => {};
let panel = null; // last drawing of the panel; null: outdated
let pointed = null; // {engine, cell} or {engine, name} under the pointer
const canvases = new Map(); // name of an engine, or "rate" -> canvas

export function watchEngines(yes, changed) {
	wanted = yes;
	redraw = () => {
		panel = null;
		changed();
	};
	watch(yes, redraw);
}

document.addEventListener("visibilitychange", () => watch(wanted, redraw));

const canvas = (name) => {
	if (!canvases.has(name)) canvases.set(name, document.createElement("canvas"));
	return canvases.get(name);
};

export const enginePanel = () => (panel ??= drawPanel());

function drawPanel() {
	const engines = [...live.engines.values()];
	const found = rates();
	drawRates(canvas("rate"), found);
	const recent = found.slice(-3);
	const now = sum(recent, ([, rate]) => rate) / (recent.length || 1);
	const count = (name) => sum(engines, (engine) => engine[name] ?? 0);
	const { tokens, jumped, drafted, accepted, refused } = drafting();
	const steps = tokens - jumped - accepted; // jumped tokens and accepted drafts take no step
	const tile = (label, value) => html`<div class="tile"><dt>${label}</dt><dd>${value}</dd></div>`;
	return html`
		<h2>Load</h2>
		${errorNote(live.error)}
		<dl class="tiles">
			${tile("Running", count("running"))} ${tile("Waiting, on time", live.lanes.on_time ?? 0)}
			${tile("Waiting, late", live.lanes.late ?? 0)} ${tile("Swapped", count("swapped"))}
			${tile("Preemptions", count("preemptions"))} ${tile("Tokens/s", now.toFixed(0))}
			${tile("Tokens per step", steps > 0 ? (tokens / steps).toFixed(2) : "-")}
			${tile("Drafts accepted", drafted ? `${Math.round((100 * accepted) / drafted)} % of ${drafted}` : "-")}
			${tile("Drafts refused", refused)}
		</dl>
		<figure>
			${canvas("rate")}
			<figcaption>Tokens/s over the last five minutes</figcaption>
		</figure>
		${engines.map(pool)}
	`;
}

function pool(engine) {
	const map = canvas(engine.engine);
	prepare(map, engine.engine);
	drawMap(map, engine);
	const cells = KINDS.map((_, kind) => sum(engine.kinds, (one) => one === kind));
	const share = Math.round((100 * (cells[2] + cells[3])) / (engine.kinds.length || 1));
	map.ariaLabel = `Blocks of ${engine.engine}: ${KINDS.map((kind, at) => `${cells[at]} ${kind}`).join(", ")}`;
	return html`
		<h2>Blocks of ${engine.engine}</h2>
		<p class="note">
			${engine.blocks} blocks${engine.per_cell > 1 ? `, ${engine.per_cell} a cell` : ""} · ${share} % in use · forecast peak
			${engine.peak_blocks}
		</p>
		<ul class="legend">
			${KINDS.map((kind, at) => html`<li><i class="k${at}"></i>${kind} ${cells[at]}</li>`)}
		</ul>
		${engine.kinds.length ? map : nothing}
		<p class="pointed">${pointed?.engine === engine.engine ? describe(engine) : "Point at a block, or use the arrow keys."}</p>
		<ul class="seqs">
			${[...engine.seqs].slice(0, LISTED).map(([name, runs]) => {
				const point = () => setPointed({ engine: engine.engine, name });
				return html`<li>
					<button class="plain" @mouseenter=${point} @focus=${point}>${name}</button>
					${sum(runs, ([, length]) => length)} blocks
				</li>`;
			})}
		</ul>
	`;
}

function describe(engine) {
	const { cell, name } = pointed;
	if (cell === undefined) return name;
	const refs = engine.refs[cell];
	const kind = KINDS[engine.kinds[cell]] + (refs > 1 ? ` by ${refs}` : "");
	return [`Block ${cell * engine.per_cell}`, kind, holders(engine, cell).join(", ")].filter(Boolean).join(": ");
}

function setPointed(what) {
	pointed = what;
	redraw();
}

/** Lets pointer and arrow keys choose a cell. */
function prepare(map, name) {
	if (map.tabIndex === 0) return;
	Object.assign(map, { tabIndex: 0, className: "map", role: "img" });
	const choose = (cell) => {
		if (cell >= 0 && cell < live.engines.get(name)?.kinds.length) setPointed({ engine: name, cell });
	};
	map.addEventListener("mousemove", ({ offsetX, offsetY }) => {
		const { size, columns } = map.grid;
		choose(Math.floor(offsetY / size) * columns + Math.min(columns - 1, Math.floor(offsetX / size)));
	});
	map.addEventListener("mouseleave", () => setPointed(null));
	map.addEventListener("keydown", (event) => {
		const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -map.grid.columns, ArrowDown: map.grid.columns }[event.key];
		if (!step) return;
		event.preventDefault();
		choose((pointed?.cell ?? -1) + step);
	});
}

/** Sizes a canvas. Returns its context and a function that reads the theme's colours. */
function open(element, width, height) {
	Object.assign(element, { width: width * devicePixelRatio, height: height * devicePixelRatio });
	Object.assign(element.style, { width: `${width}px`, height: `${height}px` });
	const context = element.getContext("2d");
	context.scale(devicePixelRatio, devicePixelRatio);
	const color = (name) => {
		element.style.color = `var(${name})`; // resolved for the theme
		return getComputedStyle(element).color;
	};
	return [context, color];
}

const widthOf = (element) => element.parentElement?.clientWidth || 300;

/** Draws the blocks of an engine, in cells as large as the panel allows: 3 to 14 pixels. */
function drawMap(map, engine) {
	const { kinds, refs, per_cell: perCell } = engine;
	const width = map.isConnected ? widthOf(map) - 32 : 300;
	const size = Math.max(3, Math.min(14, Math.floor(Math.sqrt((width * MAP_HEIGHT) / kinds.length))));
	const columns = Math.max(1, Math.floor(width / size));
	map.grid = { size, columns };
	const [context, color] = open(map, columns * size, Math.ceil(kinds.length / columns) * size);
	const colors = KINDS.map((_, kind) => color(`--k${kind}`));
	const mine = pointed?.engine === engine.engine ? pointed : {};
	const side = size > 4 ? size - GAP : size;
	const place = (cell) => [(cell % columns) * size, Math.floor(cell / columns) * size, side, side];
	kinds.forEach((kind, cell) => {
		context.fillStyle = colors[kind];
		context.globalAlpha = kind === 3 ? Math.min(1, 0.4 + 0.15 * refs[cell]) : 1;
		context.fillRect(...place(cell));
	});
	context.globalAlpha = 1;
	context.fillStyle = color("--text");
	if (mine.cell !== undefined) context.fillRect(...place(mine.cell));
	for (const [first, length] of engine.seqs.get(mine.name) ?? []) {
		for (let cell = Math.floor(first / perCell); cell * perCell < first + length; cell++) context.fillRect(...place(cell));
	}
}

function drawRates(chart, found) {
	Object.assign(chart, { role: "img", ariaLabel: "Tokens a second" });
	const [width, height] = [widthOf(chart), 64];
	const [context, color] = open(chart, width, height);
	const most = Math.max(1, ...found.map(([, rate]) => rate));
	context.strokeStyle = color("--accent");
	context.lineWidth = 1.5;
	context.beginPath();
	for (const [ago, rate] of found) context.lineTo(width * (1 - ago / 300), height - 2 - ((height - 12) * rate) / most);
	context.stroke();
	context.fillStyle = color("--soft");
	context.font = "11px system-ui";
	context.fillText(most.toFixed(0), 2, 10);
}
