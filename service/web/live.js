/**
 * The engines' state as the server streams it: blocks, running sequences, queue lanes. The stream is open only while
 * the panel is shown in a visible tab.
 */

import { call } from "./api.js";
import { events } from "./sse.js";

export const KINDS = ["free", "cached", "owned", "shared"];
const KEEP_S = 300; // seconds of tokens/s that are kept
const COUNTS = ["tokens", "jumped", "drafted", "accepted", "refused"]; // token counters of an engine since its start
const AGAIN_MS = 2000;

export const sum = (items, of) => items.reduce((all, item) => all + of(item), 0);

/** `history`: [unix s, sums of COUNTS] per second. `error`: an ApiError, shown instead. */
export const live = { engines: new Map(), lanes: {}, history: [], error: null };

let abort = null;

/** Opens the stream if the panel is `wanted`, else closes it. Calls `changed` after each event. */
export function watch(wanted, changed) {
	abort?.abort();
	if (!wanted || document.hidden) return;
	abort = new AbortController();
	follow(abort.signal, changed);
}

async function follow(signal, changed) {
	while (!signal.aborted) {
		try {
			const response = await call("engine/state", { signal });
			for await (const { data } of events(response.body)) {
				if (signal.aborted) return;
				live.error = null;
				if (data) apply(JSON.parse(data));
				changed();
			}
		} catch (error) {
			if (signal.aborted) return;
			live.error = error;
			changed();
			if (error.status >= 400 && error.status < 429) return; // no retry until another key is entered
		}
		await new Promise((done) => setTimeout(done, AGAIN_MS));
	}
}

/** Applies an event. A `full` one replaces the state, others change only the fields that they have. */
export function apply({ t, engines = [], lanes, full }) {
	if (full) live.engines.clear();
	for (const { cells, changed = [], seqs = [], gone = [], ...fields } of engines) {
		const engine = { kinds: [], refs: [], seqs: new Map(), per_cell: 1, ...live.engines.get(fields.engine), ...fields };
		if (cells) {
			const size = sum(cells, ([length]) => length);
			Object.assign(engine, { kinds: new Uint8Array(size), refs: new Uint8Array(size) });
			let first = 0;
			for (const [length, kind, refs] of cells) first = fill(engine, first, length, kind, refs);
		}
		for (const patch of changed) fill(engine, ...patch);
		for (const name of gone) engine.seqs.delete(name);
		for (const [name, ...rest] of seqs) {
			const [keep, runs] = full ? [0, ...rest] : rest; // known runs to keep
			engine.seqs.set(name, [...(engine.seqs.get(name) ?? []).slice(0, keep), ...runs]);
		}
		live.engines.set(engine.engine, engine);
	}
	live.lanes = lanes ?? live.lanes;
	remember(t / 1000);
}

function fill({ kinds, refs }, first, length, kind, count) {
	kinds.fill(kind, first, first + length);
	refs.fill(count, first, first + length);
	return first + length;
}

function remember(now) {
	if (now - live.history.at(-1)?.[0] < 1) return;
	live.history.push([now, ...counted()]);
	while (now - live.history[0][0] > KEEP_S) live.history.shift();
}

/** Returns [seconds ago, tokens/s], oldest first. A restarted engine counts from 0. */
export function rates() {
	const end = live.history.at(-1)?.[0];
	return live.history.slice(1).map(([at, tokens], before) => {
		const [from, had] = live.history[before];
		return [end - at, Math.max(0, tokens - had) / (at - from)];
	});
}

const counted = () => COUNTS.map((name) => sum([...live.engines.values()], (one) => one[name] ?? 0));

/** Returns the growth of COUNTS over the time kept, or the sums if there is none. */
export function drafting() {
	const counts = counted();
	const grown = counts.map((count, at) => count - (live.history[0]?.[at + 1] ?? 0));
	const found = grown[0] > 0 && grown.every((count) => count >= 0) ? grown : counts;
	return Object.fromEntries(COUNTS.map((name, at) => [name, found[at]]));
}

/** Returns the sequences that hold blocks of a cell. */
export function holders({ seqs, per_cell: perCell }, cell) {
	const [from, to] = [cell * perCell, (cell + 1) * perCell];
	const holds = ([first, count]) => first < to && first + count > from;
	return [...seqs].filter(([, runs]) => runs.some(holds)).map(([name]) => name);
}
