/** Draws a chat: questions, and answers side by side. */

import { isRunning, tokensPerSecond } from "./answer.js";
import { beamTree } from "./beams.js";
import { path, siblings } from "./chats.js";
import { showMarkdown } from "./markdown.js";
import { tokenView } from "./tokens.js";
import { html, nothing, render } from "./vendor/lit-html-3.3.3.js";

const seconds = (ms) => `${(ms / 1000).toFixed(ms < 9950 ? 2 : 1)} s`;
const left = (until) => Math.max(0, Math.ceil((until - Date.now()) / 1000));

/** Draws a button. name: accessible name if the label is a symbol. pressed: state of a toggle button. */
export const plain = (label, action, { name = nothing, pressed = nothing, title = nothing, disabled } = {}) =>
	html`<button type="button" class="plain" aria-label=${name} aria-pressed=${pressed} title=${title} ?disabled=${disabled}
		@click=${action}>${label}</button>`;

// State that is not stored: elements of nodes and of choices, open editors, token views.
const elements = new WeakMap();
const editing = new Set();
const tokensOf = new Map(); // choice -> index of the token shown, or null

/** Draws the shown branch of a chat. `act`: button actions. */
export function chatView(chat, act) {
	const nodes = path(chat);
	if (!nodes.length) return welcome();
	return html`<div class="thread">
		${nodes.map((node) => inPlace(node, node.role === "user" ? question(chat, node, act) : answers(chat, node, act)))}
	</div>`;
}

/** Draws each node in its own element: focus and open details stay with it when the branch changes. */
function inPlace(node, drawing) {
	render(drawing, elementOf(node));
	return elementOf(node);
}

function elementOf(owner) {
	if (!elements.has(owner)) elements.set(owner, document.createElement("div"));
	return elements.get(owner);
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
	const button = (name, sign, to) => plain(sign, () => act.choose(node, to), { name, disabled: !to });
	return html`<span class="note versions" role="group" aria-label="Versions"
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
			${plain("Cancel", () => act.redraw(editing.delete(node)))}
			<button class="primary">Send as a new branch</button>
		</div>
	</form>`;
}

function answers(chat, node, act) {
	const { answer } = node;
	const running = isRunning(answer);
	return html`<section class="answer" aria-label="Answer" aria-busy=${running}>
		${answer.body.use_beam_search
			? beams(node, act)
			: html`<div class=${several(answer) ? "several" : ""}>${answer.choices.map((_, at) => oneChoice(node, at, act))}</div>`}
		${answer.error ? errorCard(answer.error, () => act.regenerate(node)) : nothing}
		<div class="tools">
			${state(answer)} ${versions(chat, node, act)}
			${running ? plain("Stop", () => act.stop(node)) : plain("Regenerate", () => act.regenerate(node))}
		</div>
	</section>`;
}

/** Draws the picked answer of a beam search as text, and all answers as a tree. */
function beams(node, act) {
	const { answer } = node;
	if (answer.state !== "done") return nothing;
	return html`${oneChoice(node, node.picked, act)}
		${beamTree(
			answer.choices,
			({ score }, at) => html`<strong>${at + 1}.</strong> <span class="note">score ${score.toPrecision(4)}</span>
				${pickButton(node, at, act)}`,
		)}`;
}

const pickButton = (node, at, act) => plain("Continue with this", () => act.pick(node, at), { pressed: node.picked === at });

function state(answer) {
	const { queue, state } = answer;
	const wait = queue?.until ? `, about ${left(queue.until)} s` : "";
	const text = {
		waiting: queue
			? `In the late lane: ${queue.place} ahead${wait}`
			: `Waiting for the ${answer.body.stream ? "first token" : "whole answer"}`,
		paused: `Paused for ${seconds(Date.now() - answer.heard)}; it resumes by itself`,
		stopped: "Stopped",
	}[state];
	return text ? html`<span class="note state ${state}">${text}</span>` : nothing;
}

function errorCard({ status, code, message, retryAt }, again) {
	const wait = left(retryAt);
	return html`<div class="error" role="alert">
		<strong>${status || ""} ${code}</strong>
		<p>${message}</p>
		${plain(`Try again${wait ? ` (the server says in ${wait} s)` : ""}`, again)}
	</div>`;
}

const several = ({ body, choices }) => choices.length > 1 && !body.use_beam_search;

function oneChoice(node, at, act) {
	const { answer } = node;
	const choice = answer.choices[at];
	const beside = several(answer);
	const open = tokensOf.has(choice) && choice.logprobs.length > 0;
	return html`<article class="choice ${beside && node.picked === at ? "picked" : ""}" aria-label=${beside ? `Answer ${at + 1}` : nothing}>
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
					: plain("Tokens", () => toggleTokens(node, choice, open, act), {
							pressed: open,
							title: choice.logprobs.length ? nothing : "Asks for this answer again, with probabilities",
						})}
				${beside ? pickButton(node, at, act) : nothing}
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
	const element = elementOf(choice);
	element.className = "text";
	showMarkdown(element, choice.text, choice.pauses);
	return element;
}

function pretty(json) {
	try {
		return JSON.stringify(JSON.parse(json), null, 2);
	} catch {
		return json; // not complete yet
	}
}

function figures({ usage, began }, choice) {
	const rate = tokensPerSecond(choice);
	const cached = usage?.prompt_tokens_details?.cached_tokens;
	const shared = usage?.completion_tokens_details?.shared_kv_fraction;
	const parts = [
		choice.tokens && `${choice.tokens} tokens`,
		rate && `${rate.toFixed(1)} tokens/s`,
		choice.first && `first token after ${seconds(choice.first - began)}`,
		usage && `prompt ${usage.prompt_tokens}${cached ? ` (${cached} cached)` : ""}`,
		shared && `${Math.round(shared * 100)} % of KV blocks shared`,
		choice.finish === "length" && "cut at max tokens",
	];
	return html`<span class="note figures">${parts.filter(Boolean).join(" · ")}</span>`;
}
