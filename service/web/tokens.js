/** The token view: tokens coloured by surprise, and one token's alternatives. */

import { html } from "./vendor/lit-html-3.3.3.js";

const BITS = 6; // colours: one per bit, the last for all greater values

/** Surprise in bits, rounded down: 0 for a probability over 1/2, 1 for over 1/4. */
const bits = (logprob) => Math.min(BITS - 1, Math.floor(-logprob / Math.LN2));

export const percent = (logprob) => {
	const value = Math.exp(logprob) * 100;
	return `${value >= 10 ? value.toFixed(0) : value.toPrecision(2)} %`;
};

/** Shows line breaks as a symbol. */
export const inLine = (token) => token.replace(/\n/g, "\u21B5");

const visible = (token) => inLine(token).replace(/ /g, "\u2423").replace(/\t/g, "\u21E5") || "\u2205";

const at = (event) => event.target.closest("[data-at]")?.dataset.at;

/** Draws the tokens of a choice. `shown`: index of the one whose alternatives are listed; `show(index)` sets it. */
export function tokenView({ logprobs }, shown, show) {
	const move = (event) => {
		const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
		const next = step && event.target.parentElement.querySelector(`[data-at="${Number(at(event) ?? 0) + step}"]`);
		if (!next) return;
		event.preventDefault();
		next.focus();
	};
	const select = (event) => at(event) && show(Number(at(event)));
	const detail = logprobs[shown];
	return html`
		<div class="tokens" role="group" aria-label="Tokens" @mouseover=${select} @focusin=${select} @keydown=${move}
			>${logprobs.map(
				({ token, logprob }, index) => html`<span class="token s${bits(logprob)}" data-at=${index} role="button"
					tabindex=${index === (shown ?? 0) ? 0 : -1} aria-label="${visible(token)}, ${percent(logprob)}"
					>${inLine(token)}</span>${token.includes("\n") ? html`<br />` : ""}`,
			)}</div>
		${detail
			? html`<table class="alternatives">
					<caption>
						<code>${visible(detail.token)}</code> ${percent(detail.logprob)}, ${(-detail.logprob / Math.LN2).toFixed(1)} bits of
						surprise
					</caption>
					<tbody>
						${detail.top.map(
							([token, logprob]) => html`<tr class=${token === detail.token ? "picked" : ""}>
								<td><code>${visible(token)}</code></td>
								<td><meter min="0" max="1" .value=${Math.exp(logprob)} aria-label="Probability of ${visible(token)}"></meter></td>
								<td>${percent(logprob)}</td>
							</tr>`,
						)}
					</tbody>
				</table>`
			: html`<p class="note">Point at a token, or move with the arrow keys, to see its alternatives.</p>`}
	`;
}
