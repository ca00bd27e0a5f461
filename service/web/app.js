/** START HERE: the page's state, its actions and its frame. */

import { follow, isRunning, newAnswer, stop } from "./answer.js";
import { ApiError, apiKey, errorNote, models, setApiKey } from "./api.js";
import { chatView, closeEditors, plain } from "./chat_view.js";
import * as chats from "./chats.js";
import { enginePanel, watchEngines } from "./live_view.js";
import { fault, requestBody, settings, settingsPanel } from "./settings.js";
import { html, nothing, render } from "./vendor/lit-html-3.3.3.js";

const THEMES = ["auto", "light", "dark"];
const root = document.getElementById("app");
const stored = chats.restore();

const state = {
	chats: stored.chats.length ? stored.chats : [chats.newChat()],
	chat: null, // the open one
	models: [],
	model: "",
	trouble: null, // why the models are not known: an ApiError
	panel: "", // "", "settings" or "engine"
	theme: localStorage.getItem("quire.theme") ?? "auto",
};
state.chat = state.chats.find((chat) => chat.id === stored.open) ?? state.chats[0];
const running = new Map(); // answer -> AbortController

// -- drawing: at most once a frame, and at the bottom it stays at the bottom

let drawn = true;
let atEnd = true;

function changed() {
	if (!drawn) return;
	drawn = false;
	requestAnimationFrame(draw);
}

function draw() {
	drawn = true;
	document.documentElement.dataset.theme = state.theme;
	render(page(), root);
	const main = root.querySelector("main");
	if (atEnd) main.scrollTop = main.scrollHeight;
}

// -- actions

const act = {
	redraw: changed,
	copy: (text) => navigator.clipboard?.writeText(text),

	/** Asks a question under the node `parent`. */
	ask(text, parent) {
		if (!ready()) return;
		act.answer(chats.add(state.chat, parent, { role: "user", text }).id);
	},

	/** Asks for an answer to the node `parent`; returns the new node. */
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
	choose: (node, other) => keep(() => (state.chat.chosen[node.parent] = other.id)),
	pick: (node, at) => keep(() => (node.picked = at)),
};

function ready() {
	if (!fault()) return true;
	show("settings", true); // where the fault is explained
	return false;
}

function keep(change) {
	change();
	save(state.chat);
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

function open(chat) {
	if (!state.chats.includes(chat)) state.chats.unshift(chat);
	state.chat = chat;
	atEnd = true;
	chats.saveList(state.chats, chat.id);
	changed();
	document.getElementById("message")?.focus();
}

function remove(chat) {
	for (const { answer } of Object.values(chat.nodes)) if (answer) end(chat, answer);
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

function show(panel, always = false) {
	state.panel = state.panel === panel && !always ? "" : panel;
	watchEngines(state.panel === "engine", changed);
	changed();
}

const askKey = () => {
	const dialog = document.getElementById("key");
	if (!dialog.open) dialog.showModal();
};

async function loadModels() {
	try {
		state.models = await models();
		state.model ||= state.models[0];
		state.trouble = null;
	} catch (error) {
		state.trouble = error instanceof ApiError ? error : new ApiError(0, "", String(error));
		if (error.status === 401) askKey();
		else setTimeout(loadModels, 2000);
	}
	changed();
}

const toggle = (panel, label) =>
	html`<button class="plain" aria-pressed=${state.panel === panel} @click=${() => show(panel)}>${label}</button>`;

const page = () => html`
	<header class="bar">
		<strong class="brand">Quire</strong>
		<select class="model" aria-label="Model" @change=${(event) => (state.model = event.target.value)}>
			${state.models.map((name) => html`<option>${name}</option>`)}
		</select>
		<span class="space"></span>
		${toggle("engine", "Engine")} ${toggle("settings", "Settings")}
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
						<button class="plain" aria-label="Delete ${chats.title(chat)}" @click=${() => remove(chat)}>×</button>
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
		${state.panel === "settings"
			? html`<aside aria-label="Settings"><h2>Settings</h2>${settingsPanel(changed)}</aside>`
			: state.panel === "engine"
				? html`<aside class="wide" aria-label="Engine">${enginePanel()}</aside>`
				: nothing}
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
	show(state.panel, true); // a stream that was refused is asked for again
	loadModels();
}

function nextTheme() {
	state.theme = THEMES[(THEMES.indexOf(state.theme) + 1) % THEMES.length];
	localStorage.setItem("quire.theme", state.theme);
	changed();
}

function scrolled({ target }) {
	atEnd = target.scrollHeight - target.scrollTop - target.clientHeight < 40;
}

function send(event) {
	event.preventDefault();
	const box = document.getElementById("message");
	const text = box.value.trim();
	const last = chats.path(state.chat).at(-1);
	if (!text || (last?.answer && isRunning(last.answer)) || !ready()) return;
	box.value = "";
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
		else for (const { answer } of Object.values(state.chat.nodes)) if (answer && isRunning(answer)) end(state.chat, answer);
	} else if (event.key.toLowerCase() === "o" && event.ctrlKey && event.shiftKey) {
		event.preventDefault();
		open(chats.newChat());
	}
});
addEventListener("pagehide", chats.flush);

root.replaceChildren();
draw();
document.getElementById("message").focus();
loadModels();
for (const chat of state.chats) {
	for (const { answer } of Object.values(chat.nodes)) if (answer && isRunning(answer)) read(chat, answer);
}
