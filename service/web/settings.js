/** Fields of a request besides its messages. Empty fields are not sent. */

import { html } from "./vendor/lit-html-3.3.3.js";

const STORED = "quire.settings";

// Step of each input. The server checks the bounds of the numbers.
const NUMBERS = {
	temperature: 0.1,
	top_p: 0.05,
	top_k: 1,
	min_p: 0.01,
	max_tokens: 1,
	seed: 1,
	presence_penalty: 0.1,
	frequency_penalty: 0.1,
	repetition_penalty: 0.05,
	n: 1,
	beam_width: 1,
};
const label = (name) => (name === "n" ? "Answers" : name[0].toUpperCase() + name.slice(1).replace("_", " "));
const ALTERNATIVES = 5; // alternatives per token

export const settings = { system: "", stop: "", extra: "", logprobs: false, ...JSON.parse(sessionStorage.getItem(STORED) ?? "{}") };

/** Returns the body of a chat request. Throws SyntaxError if "Other fields" is no JSON object. */
export function requestBody(model, messages, { logprobs = settings.logprobs } = {}) {
	const body = { model, messages };
	for (const name in NUMBERS) if (settings[name]) body[name] = Number(settings[name]);
	const stop = settings.stop.split("\n").filter(Boolean);
	if (stop.length) body.stop = stop;
	if (body.beam_width) {
		body.n ??= body.beam_width;
		Object.assign(body, { use_beam_search: true, logprobs: true }); // a search is not streamed
	} else {
		Object.assign(body, { stream: true, stream_options: { include_usage: true } });
		if (logprobs) Object.assign(body, { logprobs: true, top_logprobs: ALTERNATIVES });
	}
	return { ...body, ...otherFields() };
}

function otherFields() {
	const found = JSON.parse(settings.extra || "{}");
	if (found === null || typeof found !== "object" || Array.isArray(found)) throw new SyntaxError("no JSON object");
	return found;
}

/** Returns the error in the text of "Other fields", or "". */
export function fault() {
	try {
		otherFields();
		return "";
	} catch (error) {
		return `Other fields: ${error.message}`;
	}
}

/** Draws the fields. A field that has the focus is never overwritten. */
export function settingsPanel(changed) {
	const input = ({ target }) => {
		settings[target.name] = target.type === "checkbox" ? target.checked : target.value;
		sessionStorage.setItem(STORED, JSON.stringify(settings));
		changed();
	};
	const wrong = fault();
	const box = (name, label, rows, wrong) => html`<label class="field">
		${label}
		<textarea name=${name} rows=${rows} aria-invalid=${!!wrong} .defaultValue=${settings[name]} @input=${input}></textarea>
	</label>`;
	const number = ([name, step]) => html`<label class="field">
		${label(name)}
		<input type="number" name=${name} step=${step} placeholder="default" value=${settings[name] ?? ""} @input=${input} />
	</label>`;
	return html`<h2>Settings</h2>
		${box("system", "System prompt", 3)}
		<div class="pairs">${Object.entries(NUMBERS).map(number)}</div>
		${box("stop", "Stop strings, one a line", 2)} ${box("extra", "Other fields, such as tools (JSON)", 3, wrong)}
		${wrong ? html`<p class="wrong" role="alert">${wrong}</p>` : ""}
		<label class="check">
			<input type="checkbox" name="logprobs" .checked=${settings.logprobs} @change=${input} />
			Token probabilities
		</label>
	`;
}
