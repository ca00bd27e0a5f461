/** The answers of a beam search as a tree: common beginnings are drawn once. */

import { inLine, percent } from "./tokens.js";
import { html, nothing } from "./vendor/lit-html-3.3.3.js";

/** Returns the tokens of an answer without its end token, which is not in the text. */
function tokensOf({ logprobs, text, finish }) {
	const ended = finish === "stop" && !text.endsWith(logprobs.at(-1)?.token ?? "");
	return ended ? logprobs.slice(0, -1) : logprobs;
}

/** Draws the tree. `end(choice, at)` returns what follows the last token of an answer. */
export function beamTree(choices, end) {
	const beams = choices.map((choice, at) => ({ end: end(choice, at), tokens: tokensOf(choice) }));
	return html`<ul class="beams" aria-label="Beams">${branch(beams, 0)}</ul>`;
}

const leaf = ({ end }) => html`<li>${end}</li>`;

/** Draws beams that are equal up to the token `from`: their common next tokens, then a branch per different token. */
function branch(beams, from) {
	const [{ tokens }] = beams;
	const shared = (at) => beams.every((beam) => beam.tokens[at]?.token === tokens[at].token);
	let to = from;
	while (to < tokens.length && shared(to)) to++;
	const run = tokens.slice(from, to);
	const ways = Map.groupBy(beams, (beam) => beam.tokens[to]?.token);
	return html`<li>
		${run.length
			? html`<span class="run">${run.map(({ token }) => inLine(token)).join("")}</span>
					<span class="note" title="Its first token">${percent(run[0].logprob)}</span>`
			: nothing}
		<ul>${[...ways].map(([token, group]) => (token === undefined ? group.map(leaf) : branch(group, to)))}</ul>
	</li>`;
}
