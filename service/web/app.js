/** START HERE: the page's state, its actions and its frame. */

import { follow, isRunning, newAnswer, stop } from "./answer.js";
import { apiKey, errorNote, models, setApiKey } from "./api.js";
import { chatView, closeEditors, plain } from "./chat_view.js";
import * as chats from "./chats.js";
import { enginePanel, watchEngines } from "./live_view.js";
import { fault, requestBody, settings, settingsPanel } from "./settings.js";
import { html, nothing, render } from "./vendor/lit-html-3.3.3.js";

const NEXT_THEME = { auto: "light", light: "dark", dark: "auto" };
const PANELS = { Engine: enginePanel, Settings: () => settingsPanel(changed) };
const root = document.getElementById("app");
const composer = () => document.getElementById("message");
const stored = chats.restore();

const state = {
	chats: stored.chats.length ? stored.chats : [chats.newChat()],
	chat: null, // the open chat
	models: [],
	model: "",
	trouble: null, // error of the request for the list of models
	panel: "", // name of the open panel; "": none
	theme: localStorage.getItem("quire.theme") ?? "auto",
};
state.chat = state.chats.find((chat) => chat.id === stored.open) ?? state.chats[0];
const running = new Map(); // answer -> AbortController

// -- drawing: at most once per frame; a page scrolled to its end stays there

let frame = 0; // id of the animation frame
let atEnd = true;

const changed = () => (frame ||= requestAnimationFrame(draw));

function draw() {
	frame = 0;
	document.documentElement.dataset.theme = state.theme;
	render(page(), root);
	const main = root.querySelector("main");
	if (atEnd) main.scrollTop = main.scrollHeight;
}

// -- actions

const act = {
	redraw: changed,
	copy: (text) => navigator.clipboard?.writeText(text),

	/** Adds a question under the node `parent`. */
	ask(text, parent) {
		if (!ready()) return;
		act.answer(chats.add(state.chat, parent, { role: "user", text }).id);
	},

	/** Requests an answer to the node `parent`; returns the new node. */
	answer(parent, options) {
		const { chat } = state;
		const messages = chats.messages(chat, parent, settings.system);
		const answer = newAnswer(requestBody(state.model, messages, options));
		const node = chats.add(chat, parent, { role: "assistant", answer, picked: 0 });
		atEnd = true;
		chats.saveList(state.chats, chat.id);
		read(chat, answer);
		return node;
	},

	regenerate: (node, options) => (ready() ? act.answer(node.parent, options) : null),
	stop: ({ answer }) => end(state.chat, answer),
	choose: (node, other) => save(state.chat, (state.chat.chosen[node.parent] = other.id)),
	pick: (node, at) => save(state.chat, (node.picked = at)),
};

function ready() {
	if (!fault()) return true;
	show("Settings", true);
	return false;
}

function save(chat) {
	chats.save(chat);
	changed();
}

function read(chat, answer) {
	const abort = new AbortController();
	running.set(answer, abort);
	const update = () => save(chat);
	follow(answer, update, abort).finally(() => {
		running.delete(answer);
		if (answer.error?.status === 401) askKey();
	});
	update();
}

function end(chat, answer) {
	if (isRunning(answer)) stop(answer, running.get(answer));
	save(chat);
}

function endAll(chat) {
	for (const answer of chats.answers(chat)) end(chat, answer);
}

function open(chat) {
	if (!state.chats.includes(chat)) state.chats.unshift(chat);
	state.chat = chat;
	atEnd = true;
	chats.saveList(state.chats, chat.id);
	changed();
	composer()?.focus();
}

function remove(chat) {
	endAll(chat);
	chats.forget(chat);
	state.chats = state.chats.filter((other) => other !== chat);
	open(state.chat === chat ? (state.chats[0] ?? chats.newChat()) : state.chat);
}

function exportChat() {
	const text = JSON.stringify({ ...state.chat, model: state.model }, null, 2);
	const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
	Object.assign(document.createElement("a"), { href: url, download: `chat-${state.chat.id}.json` }).click();
	URL.revokeObjectURL(url);
}

function show(panel, always) {
	state.panel = state.panel === panel && !always ? "" : panel;
	watchEngines(state.panel === "Engine", changed);
	changed();
}

const askKey = () => document.getElementById("key").showModal();

async function loadModels() {
	try {
		state.models = await models();
		state.model ||= state.models[0];
		state.trouble = null;
	} catch (error) {
		state.trouble = error;
		if (error.status === 401) askKey();
		else setTimeout(loadModels, 2000);
	}
	changed();
}

const page = () => html`
	<header class="bar">
		<strong class="brand">Quire</strong>
		<select class="model" aria-label="Model" @change=${(event) => (state.model = event.target.value)}>
			${state.models.map((name) => html`<option>${name}</option>`)}
		</select>
		<span class="space"></span>
		${Object.keys(PANELS).map((name) => plain(name, () => show(name), { pressed: state.panel === name }))}
		<a href="docs">API</a>
		${plain("API key", askKey)} ${plain("Export", exportChat)} ${plain(`Theme: ${state.theme}`, nextTheme)}
	</header>
	<div class="body">
		<nav aria-label="Chats">
			<button class="primary" @click=${() => open(chats.newChat())}>New chat</button>
			<ul>
				${state.chats.map(
					(chat) => html`<li class=${chat === state.chat ? "open" : ""}>
						<button class="plain name" aria-current=${chat === state.chat} @click=${() => open(chat)}>${chats.title(chat)}</button>
						${plain("×", () => remove(chat), { name: `Delete ${chats.title(chat)}` })}
					</li>`,
				)}
			</ul>
		</nav>
		<div class="middle">
			<main tabindex="-1" aria-label="Chat" @scroll=${scrolled}>${chatView(state.chat, act)}</main>
			${state.trouble?.status === 401 ? nothing : errorNote(state.trouble)}
			<form class="composer" @submit=${send}>
				<textarea id="message" rows="2" aria-label="Message" placeholder="Message" @keydown=${enter}></textarea>
				<button class="primary">Send</button>
			</form>
		</div>
		${state.panel ? html`<aside aria-label=${state.panel}>${PANELS[state.panel]()}</aside>` : nothing}
	</div>
	<dialog id="key" aria-labelledby="key-title">
		<form method="dialog" @submit=${takeKey}>
			<h2 id="key-title">API key</h2>
			<p>${state.trouble?.status === 401 ? state.trouble.message : "The key is kept until this tab is closed."}</p>
			<label class="field">Key <input type="password" name="key" autocomplete="off" .value=${apiKey()} /></label>
			<div class="tools"><button class="primary">Use this key</button></div>
		</form>
	</dialog>
`;

function takeKey(event) {
	setApiKey(event.target.elements.key.value.trim());
	show(state.panel, true); // a refused stream is retried
	loadModels();
}

function nextTheme() {
	state.theme = NEXT_THEME[state.theme];
	localStorage.setItem("quire.theme", state.theme);
	changed();
}

function scrolled({ target }) {
	atEnd = target.scrollHeight - target.scrollTop - target.clientHeight < 40;
}

function send(event) {
	event.preventDefault();
	const text = composer().value.trim();
	const last = chats.path(state.chat).at(-1);
	if (!text || (last?.answer && isRunning(last.answer)) || !ready()) return;
	composer().value = "";
	act.ask(text, last?.id ?? "");
}

function enter(event) {
	if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
	event.preventDefault();
	event.target.form.requestSubmit();
}

document.addEventListener("keydown", (event) => {
	if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
		if (closeEditors()) changed();
		else endAll(state.chat);
	} else if (event.key.toLowerCase() === "o" && event.ctrlKey && event.shiftKey) {
		event.preventDefault();
		open(chats.newChat());
	}
});
addEventListener("pagehide", chats.flush);

root.replaceChildren();
draw();
composer().focus();
loadModels();
for (const chat of state.chats) for (const answer of chats.answers(chat).filter(isRunning)) read(chat, answer);
