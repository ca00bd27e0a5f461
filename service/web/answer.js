/**
 * One answer: requests it, reads its stream, resumes it after a lost connection.
 *
 *     waiting -> streaming <-> paused -> done | stopped | failed
 *
 * An answer is plain data, stored with the id of its last event. After a reload `follow` continues from there.
 * Times are unix milliseconds.
 */

import { ApiError, begin, cancel, resume } from "./api.js";
import { events } from "./sse.js";

const QUIET_MS = 1000; // minimum silence in ms that counts as a pause
const QUIET_GAPS = 8; // slow model: minimum pause, in usual gaps between tokens
const GIVE_UP_MS = 60_000; // ms; the server stores an ended answer for a minute
const RETRY_MS = [100, 300, 1000, 2000];

export function newAnswer(body) {
	return {
		body,
		key: crypto.getRandomValues(new Uint32Array(4)).join("-"), // randomUUID exists on https and localhost only
		requestId: null,
		last: null, // id of the last event
		state: "waiting",
		began: Date.now(),
		heard: Date.now(),
		queue: null, // {place, until}
		error: null, // {status, code, message, retryAt}
		usage: null,
		choices: Array.from({ length: body.n ?? 1 }, () => ({
			text: "",
			reasoning: "",
			calls: [],
			logprobs: [],
			finish: null,
			tokens: 0,
			first: null,
			last: null,
			pauses: [], // {at: characters of text before the pause, ms, why}
		})),
	};
}

export const isRunning = (answer) => ["waiting", "streaming", "paused"].includes(answer.state);

/** Returns the minimum silence in ms that counts as a pause. */
function quietMs(answer) {
	const tokens = Math.max(...answer.choices.map((choice) => choice.tokens));
	const first = Math.min(...answer.choices.map((choice) => choice.first ?? Infinity));
	const gap = tokens > 1 ? (answer.heard - first) / (tokens - 1) : 0;
	return Math.max(QUIET_MS, QUIET_GAPS * gap);
}

/** Reads the answer to its end, or until `abort`. Calls `changed` after each change. */
export async function follow(answer, changed, abort) {
	let why = answer.last ? "page reloaded" : null;
	let lostAt = 0;
	let tries = 0;
	const clock = setInterval(() => {
		if (answer.state === "streaming" && Date.now() - answer.heard > quietMs(answer)) answer.state = "paused";
		changed(); // draws the remaining waiting time
	}, 250);
	try {
		for (;;) {
			try {
				const response = await (answer.last ? resume(answer.last, abort.signal) : begin(answer.body, answer.key, abort.signal));
				takeHeaders(answer, response.headers);
				if (!answer.body.stream) return takeWhole(answer, await response.json());
				for await (const event of events(response.body)) {
					lostAt = tries = 0;
					take(answer, event, why);
					if (event.data !== undefined) why = null;
					if (answer.state === "stopped") stop(answer, abort); // stopped before its id was known
					changed();
					if (!isRunning(answer)) return;
				}
			} catch (error) {
				if (abort.signal.aborted) return;
				const passing = answer.last && [0, 503].includes(error.status);
				if (error instanceof ApiError && !passing) return fail(answer, error);
			}
			why = "connection lost";
			lostAt ||= Date.now();
			if (Date.now() - lostAt > GIVE_UP_MS) return fail(answer, new ApiError(0, "no_connection", "The connection was lost."));
			await new Promise((done) => setTimeout(done, RETRY_MS[Math.min(tries++, RETRY_MS.length - 1)]));
			if (abort.signal.aborted) return;
		}
	} finally {
		clearInterval(clock);
		changed();
	}
}

/** Cancels an answer, also in the server: by its id or, if it has none, by closing the connection. */
export function stop(answer, abort) {
	answer.state = "stopped";
	if (answer.requestId || !answer.body.stream) abort.abort();
	if (answer.requestId) cancel(answer.requestId);
}

function fail(answer, { status, code, message, retryAfterS }) {
	answer.state = "failed";
	answer.error = { status, code, message, retryAt: retryAfterS ? Date.now() + retryAfterS * 1000 : null };
}

function takeHeaders(answer, headers) {
	answer.requestId = headers.get("x-answer-id");
	const place = headers.get("x-queue-place");
	if (headers.get("x-queue-lane") === "late" && place !== null) setQueue(answer, place, headers.get("x-queue-wait"));
}

function setQueue(answer, place, waitS) {
	answer.queue = { place, until: Number(waitS) ? Date.now() + waitS * 1000 : null };
}

/** Adds one event or comment. */
function take(answer, event, why) {
	if (event.comment !== undefined) {
		const queued = /^queued place=(\d+)(?: wait_s=([\d.]+))?$/.exec(event.comment);
		if (queued) setQueue(answer, queued[1], queued[2]);
		return;
	}
	if (event.data === "[DONE]") {
		if (isRunning(answer)) answer.state = "done";
		return;
	}
	const data = JSON.parse(event.data);
	if (data.error) return fail(answer, data.error);
	if (answer.state !== "waiting") markPause(answer, Date.now(), why);
	takeChoices(answer, data);
	if (event.id) {
		countTokens(answer, event.id);
		answer.last = event.id;
	}
}

/** Reads a non-streaming answer. */
function takeWhole(answer, data) {
	takeChoices(answer, data);
	for (const choice of answer.choices) Object.assign(choice, { tokens: choice.logprobs.length, first: null });
	answer.state = "done";
}

function takeChoices(answer, { id, choices, usage }) {
	const now = Date.now();
	answer.requestId = id;
	for (const choice of choices) takeDelta(answer, answer.choices[choice.index], choice, now);
	if (usage) answer.usage = usage;
	answer.heard = now;
}

/** Records a pause if the last event is long enough ago. */
function markPause(answer, now, why) {
	const ms = now - answer.heard;
	if (!why && ms <= quietMs(answer)) return;
	for (const choice of answer.choices) {
		if (!choice.finish && choice.first) choice.pauses.push({ at: choice.text.length, ms, why: why ?? "engine silent" });
	}
}

/** Adds content of a choice: an event's `delta`, or the `message` of a non-streaming answer. */
function takeDelta(answer, into, { message, delta = message, logprobs, finish_reason: finish, score }, now) {
	into.text += delta.content ?? "";
	into.reasoning += delta.reasoning_content ?? "";
	for (const [at, call] of (delta.tool_calls ?? []).entries()) {
		const known = (into.calls[call.index ?? at] ??= { id: call.id, name: "", arguments: "" });
		known.name += call.function?.name ?? "";
		known.arguments += call.function?.arguments ?? "";
	}
	for (const { token, logprob, top_logprobs: top } of logprobs?.content ?? []) {
		into.logprobs.push({ token, logprob, top: top.map((other) => [other.token, other.logprob]) });
	}
	if (finish) Object.assign(into, { finish, score });
	if (delta.content || delta.reasoning_content || delta.tool_calls) {
		into.first ??= now;
		into.last = now;
		if (answer.state !== "stopped") answer.state = "streaming";
		answer.queue = null;
	}
}

/** An event's id counts the tokens of each choice: `ID:17,,20`. */
function countTokens(answer, id) {
	const counts = id.split(":")[1].split(",");
	answer.choices.forEach((choice, at) => (choice.tokens = Number(counts[at]) || choice.tokens));
}

/** Returns tokens/s after the first token, or null. */
export function tokensPerSecond(choice) {
	const ms = choice.last - choice.first;
	return choice.tokens > 1 && ms > 0 ? ((choice.tokens - 1) * 1000) / ms : null;
}
