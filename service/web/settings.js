/** What a request says besides its messages. An empty field is not sent. */

import { html } from "./vendor/lit-html-3.3.3.js";

const STORED = "quire.settings";

// Steps. The server knows the limits, and says so.
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
};
const label = (name) => (name === "n" ? "Answers" : name[0].toUpperCase() + name.slice(1).replace("_", " "));
const ALTERNATIVES = 5; // of each token, in the token view

const EMPTY = { system: "", stop: "", extra: "", logprobs: false };

export const settings = { ...EMPTY, ...JSON.parse(sessionStorage.getItem(STORED) ?? "{}") };

function set(name, value) {
	settings[name] = value;
	sessionStorage.setItem(STORED, JSON.stringify(settings));
}

/** Returns the body of a chat request. Throws SyntaxError if the other fields are no JSON object. */
export function requestBody(model, messages, { logprobs = settings.logprobs } = {}) {
	const body = { model, messages, stream: true, stream_options: { include_usage: true } };
	for (const name in NUMBERS) if (settings[name]) body[name] = Number(settings[name]);
	const stop = settings.stop.split("\n").filter(Boolean);
	if (stop.length) body.stop = stop;
	if (logprobs) Object.assign(body, { logprobs: true, top_logprobs: ALTERNATIVES });
	return { ...body, ...otherFields() };
}

function otherFields() {
	const found = JSON.parse(settings.extra || "{}");
	if (found === null || typeof found !== "object" || Array.isArray(found)) throw new SyntaxError("no JSON object");
	return found;
}

/** Returns what is wrong with the other fields, or "". */
export function fault() {
	try {
		otherFields();
		return "";
	} catch (error) {
		return `Other fields: ${error.message}`;
	}
}

/** Draws the fields. What is being typed is never written back. */
export function settingsPanel(changed) {
	const input = (name) => ({ target }) => {
		set(name, target.type === "checkbox" ? target.checked : target.value);
		changed();
	};
	const wrong = fault();
	const box = (name, label, rows, wrong) => html`<label class="field">
		${label}
		<textarea name=${name} rows=${rows} aria-invalid=${!!wrong} .defaultValue=${settings[name]} @input=${input(name)}></textarea>
	</label>`;
	const number = ([name, step]) => html`<label class="field">
		${label(name)}
		<input type="number" name=${name} step=${step} placeholder="default" value=${settings[name] ?? ""} @input=${input(name)} />
	</label>`;
	return html`
		${box("system", "System prompt", 3)}
		<div class="pairs">${Object.entries(NUMBERS).map(number)}</div>
		${box("stop", "Stop strings, one a line", 2)} ${box("extra", "Other fields, such as tools (JSON)", 3, wrong)}
		${wrong ? html`<p class="wrong" role="alert">${wrong}</p>` : ""}
		<label class="check">
			<input type="checkbox" name="logprobs" .checked=${settings.logprobs} @change=${input("logprobs")} />
			Token probabilities
		</label>
	`;
}
