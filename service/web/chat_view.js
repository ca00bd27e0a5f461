/** Draws a chat: questions, and answers side by side. */

import { isRunning, tokensPerSecond } from "./answer.js";
import { path, siblings } from "./chats.js";
import { showMarkdown } from "./markdown.js";
import { tokenView } from "./tokens.js";
import { html, nothing, render } from "./vendor/lit-html-3.3.3.js";

const seconds = (ms) => `${(ms / 1000).toFixed(ms < 9950 ? 2 : 1)} s`;
const left = (until) => Math.max(0, Math.ceil((until - Date.now()) / 1000));

export const plain = (label, action) => html`<button class="plain" @click=${action}>${label}</button>`;

const AGAIN = "Asks for this answer again, with probabilities";

// What is not stored: rendered texts, open editors, token views.
const places = new WeakMap();
const rendered = new WeakMap();
const editing = new Set();
const tokensOf = new Map(); // choice -> index of the token shown, or null

/** Draws the shown branch of a chat. `act`: what the buttons do. */
export function chatView(chat, act) {
	const nodes = path(chat);
	if (!nodes.length) return welcome();
	return html`<div class="thread">
		${nodes.map((node) => inPlace(node, node.role === "user" ? question(chat, node, act) : answers(chat, node, act)))}
	</div>`;
}

/** Each node keeps its elements, so a change of branch moves neither focus nor open details to another. */
function inPlace(node, drawing) {
	if (!places.has(node)) places.set(node, document.createElement("div"));
	render(drawing, places.get(node));
	return places.get(node);
}

const welcome = () => html`<div class="welcome">
	<h1>Ask the model something.</h1>
	<p>An answer resumes when you reload the page, and when the engine that writes it is killed.</p>
	<p class="note"><kbd>Enter</kbd> sends, <kbd>Esc</kbd> stops, <kbd>Ctrl</kbd> <kbd>Shift</kbd> <kbd>O</kbd> begins a new chat.</p>
</div>`;

/** Ends the open editor, if there is one. Returns whether there was. */
export function closeEditors() {
	const open = editing.size > 0;
	editing.clear();
	return open;
}

function versions(chat, node, act) {
	const all = siblings(chat, node);
	const at = all.indexOf(node);
	if (all.length < 2) return nothing;
	const button = (label, sign, to) =>
		html`<button class="plain" aria-label=${label} ?disabled=${!to} @click=${() => act.choose(node, to)}>${sign}</button>`;
	return html`<span class="versions" role="group" aria-label="Versions"
		>${button("Previous version", "‹", all[at - 1])} ${at + 1} of ${all.length} ${button("Next version", "›", all[at + 1])}</span
	>`;
}

function question(chat, node, act) {
	if (editing.has(node)) return editor(node, act);
	return html`<section class="question" aria-label="You">
		<div class="bubble">${node.text}</div>
		<div class="tools">
			${versions(chat, node, act)}
			${plain("Edit", () => act.redraw(editing.add(node)))}
		</div>
	</section>`;
}

function editor(node, act) {
	const close = () => act.redraw(editing.delete(node));
	const send = (event) => {
		event.preventDefault();
		const text = event.target.elements.text.value.trim();
		if (!text) return;
		editing.delete(node);
		act.ask(text, node.parent);
	};
	return html`<form class="question editor" @submit=${send}>
		<textarea name="text" rows="4" aria-label="Edited message" .value=${node.text}></textarea>
		<div class="tools">
			<button type="button" class="plain" @click=${close}>Cancel</button>
			<button class="primary">Send as a new branch</button>
		</div>
	</form>`;
}

function answers(chat, node, act) {
	const { answer } = node;
	const running = isRunning(answer);
	const several = answer.choices.length > 1;
	return html`<section class="answer" aria-label="Answer" aria-busy=${running}>
		<div class="choices ${several ? "several" : ""}">
			${answer.choices.map((choice, at) => oneChoice(node, choice, at, several, act))}
		</div>
		${answer.error ? errorCard(answer.error, () => act.regenerate(node)) : nothing}
		<div class="tools">
			${state(answer)} ${versions(chat, node, act)}
			${running ? plain("Stop", () => act.stop(node)) : plain("Regenerate", () => act.regenerate(node))}
		</div>
	</section>`;
}

function state(answer) {
	const { queue, state } = answer;
	const wait = queue?.until ? `, about ${left(queue.until)} s` : "";
	const text = {
		waiting: queue ? `In the late lane: ${queue.place} ahead${wait}` : "Waiting for the first token",
		paused: `Paused for ${seconds(Date.now() - answer.heard)}; it resumes by itself`,
		stopped: "Stopped",
	}[state];
	return text ? html`<span class="state ${state}">${text}</span>` : nothing;
}

function errorCard({ status, code, message, retryAt }, again) {
	const wait = retryAt ? left(retryAt) : 0;
	return html`<div class="error" role="alert">
		<strong>${status || ""} ${code}</strong>
		<p>${message}</p>
		${plain(`Try again${wait ? ` (the server says in ${wait} s)` : ""}`, again)}
	</div>`;
}

function oneChoice(node, choice, at, several, act) {
	const { answer, picked } = node;
	const open = tokensOf.has(choice) && choice.logprobs.length > 0;
	return html`<article class="choice ${several && picked === at ? "picked" : ""}" aria-label=${several ? `Answer ${at + 1}` : nothing}>
		${choice.reasoning
			? html`<details class="reasoning">
					<summary>${choice.text || choice.calls.length ? "Reasoning" : "Reasoning…"}</summary>
					<div class="pre">${choice.reasoning}</div>
				</details>`
			: nothing}
		${open
			? tokenView(choice, tokensOf.get(choice), (index) => {
					if (tokensOf.get(choice) !== index) act.redraw(tokensOf.set(choice, index));
				})
			: text(choice)}
		${choice.calls.map(
			(call) => html`<div class="call"><strong>${call.name}</strong><pre>${pretty(call.arguments)}</pre></div>`,
		)}
		<footer>
			${figures(answer, choice)}
			<span class="tools">
				${plain("Copy", () => act.copy(choice.text))}
				${isRunning(answer)
					? nothing
					: html`<button class="plain" aria-pressed=${open} title=${choice.logprobs.length ? "" : AGAIN}
							@click=${() => toggleTokens(node, choice, open, act)}>Tokens</button>`}
				${several
					? html`<button class="plain" aria-pressed=${picked === at} @click=${() => act.pick(node, at)}>Continue with this</button>`
					: nothing}
			</span>
		</footer>
	</article>`;
}

function toggleTokens(node, choice, open, act) {
	if (open) act.redraw(tokensOf.delete(choice));
	else if (choice.logprobs.length) act.redraw(tokensOf.set(choice, null));
	else for (const one of act.regenerate(node, { logprobs: true })?.answer.choices ?? []) tokensOf.set(one, null);
}

function text(choice) {
	if (!rendered.has(choice)) {
		const container = document.createElement("div");
		container.className = "text";
		rendered.set(choice, container);
	}
	const container = rendered.get(choice);
	showMarkdown(container, choice.text, choice.pauses);
	return container;
}

function pretty(json) {
	try {
		return JSON.stringify(JSON.parse(json), null, 2);
	} catch {
		return json; // not complete yet
	}
}

function figures(answer, choice) {
	const rate = tokensPerSecond(choice);
	const parts = [];
	if (choice.tokens) parts.push(`${choice.tokens} tokens`);
	if (rate) parts.push(`${rate.toFixed(1)} tokens/s`);
	if (choice.first) parts.push(`first token after ${seconds(choice.first - answer.began)}`);
	if (answer.usage) {
		const cached = answer.usage.prompt_tokens_details?.cached_tokens;
		parts.push(`prompt ${answer.usage.prompt_tokens}${cached ? ` (${cached} cached)` : ""}`);
	}
	if (choice.finish === "length") parts.push("cut at max tokens");
	return html`<span class="figures">${parts.join(" · ")}</span>`;
}
