/** What a request says besides its messages. An empty field is not sent: the server's default holds. */

import { html } from "./vendor/lit-html.js";

const STORED = "quire.settings";

// name, label, attributes of the number field
const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.05 }],
  ["top_k", "Top k", { min: -1, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }],
  ["max_tokens", "Max tokens", { min: -1, step: 1 }],
  ["seed", "Seed", { step: 1 }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1 }],
  ["repetition_penalty", "Repetition penalty", { min: 0.01, max: 100, step: 0.05 }],
  ["n", "Answers", { min: 1, max: 128, step: 1 }],
];
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
  for (const [name] of NUMBERS) if (settings[name]) body[name] = Number(settings[name]);
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

/** Returns what is wrong with the other fields; "" if they can be sent. */
export function fault() {
  try {
    otherFields();
    return "";
  } catch (error) {
    return `Other fields: ${error.message}`;
  }
}

/** Draws the fields. Calls `changed` after each change. */
export function settingsPanel(changed) {
  const input = (name) => (event) => {
    set(name, event.target.value);
    changed();
  };
  const wrong = fault();
  return html`
    <label class="field"
      >System prompt
      <textarea rows="3" .value=${settings.system} @input=${input("system")}></textarea>
    </label>
    <div class="pairs">
      ${NUMBERS.map(
        ([name, label, { min, max, step }]) => html`<label class="field"
          >${label}
          <input
            type="number"
            name=${name}
            inputmode="decimal"
            placeholder="default"
            min=${min ?? ""}
            max=${max ?? ""}
            step=${step}
            .value=${settings[name] ?? ""}
            @input=${input(name)}
        /></label>`,
      )}
    </div>
    <label class="field"
      >Stop strings, one a line
      <textarea rows="2" name="stop" .value=${settings.stop} @input=${input("stop")}></textarea>
    </label>
    <label class="field"
      >Other fields (JSON)
      <textarea rows="3" name="extra" class="mono" spellcheck="false" placeholder='{"tools": []}' aria-invalid=${wrong !== ""}
        .value=${settings.extra} @input=${input("extra")}></textarea>
    </label>
    ${wrong ? html`<p class="wrong" role="alert">${wrong}</p>` : ""}
    <label class="check">
      <input
        type="checkbox"
        name="logprobs"
        .checked=${settings.logprobs}
        @change=${(event) => {
          set("logprobs", event.target.checked);
          changed();
        }}
      />
      Token probabilities
    </label>
    <button
      class="plain"
      @click=${() => {
        for (const name of Object.keys(settings)) delete settings[name];
        Object.assign(settings, EMPTY);
        set("system", "");
        changed();
      }}
    >
      Reset to defaults
    </button>
  `;
}
