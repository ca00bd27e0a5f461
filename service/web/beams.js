/** The answers of a beam search as a tree: what several of them begin with is drawn once. */

import { html, nothing } from "./vendor/lit-html-3.3.3.js";

const percent = (logprob) => `${(Math.exp(logprob) * 100).toPrecision(2)} %`;
const visible = (text) => text.replace(/\n/g, "\u21B5");

/** Returns the tokens of an answer, without the one that ended it, which is no part of its text. */
function said({ logprobs, text, finish }) {
	const ends = finish === "stop" && !text.endsWith(logprobs.at(-1)?.token ?? "");
	return { tokens: ends ? logprobs.slice(0, -1) : logprobs };
}

/**
 * Returns {tokens, leaves, branches} of the answers from token `depth` on. They are equal up to there.
 *
 * answers: {tokens, ...}. tokens: what all of them have next. leaves: answers that end behind it. branches: the same of the others, by token.
 */
export function grow(answers, depth = 0) {
	const [one] = answers;
	let end = depth;
	while (end < one.tokens.length && answers.every(({ tokens }) => tokens[end]?.token === one.tokens[end].token)) end++;
	const ways = new Map();
	for (const answer of answers) {
		const token = answer.tokens[end]?.token;
		ways.set(token, [...(ways.get(token) ?? []), answer]);
	}
	const leaves = ways.get(undefined) ?? [];
	ways.delete(undefined);
	return { tokens: one.tokens.slice(depth, end), leaves, branches: [...ways.values()].map((group) => grow(group, end)) };
}

/** Draws the tree. `leaf(choice)`: what stands at the end of an answer. */
export function beamTree(choices, leaf) {
	const branch = ({ tokens, leaves, branches }, root) => html`<li>
		${tokens.length
			? html`<span class="run">${tokens.map(({ token }) => visible(token)).join("")}</span>
					${root ? nothing : html`<span class="note">${percent(tokens[0].logprob)}</span>`}`
			: nothing}
		${leaves.map(({ choice }) => html`<div class="leaf">${leaf(choice)}</div>`)}
		${branches.length ? html`<ul>${branches.map((next) => branch(next, false))}</ul>` : nothing}
	</li>`;
	return html`<ul class="beams" aria-label="Beams">${branch(grow(choices.map((choice) => ({ choice, ...said(choice) }))), true)}</ul>`;
}
