/** Calls of the public API. The page knows no other way to the server. */

const KEY = "quire.key"; // in sessionStorage: it is gone with the tab, and no other site or tab reads it
const BASE = new URL(".", document.baseURI); // the page may be served under a path prefix

/** An answer that is no success, or no answer at all (status 0). `retryAfterS` is null where the server names none. */
export class ApiError extends Error {
	constructor(status, code, message, retryAfterS = null) {
		super(message);
		Object.assign(this, { status, code, retryAfterS });
	}
}

export const apiKey = () => sessionStorage.getItem(KEY) ?? "";

export function setApiKey(key) {
	if (key) sessionStorage.setItem(KEY, key);
	else sessionStorage.removeItem(KEY);
}

/** Sends a request. Returns the response of a success, throws ApiError for anything else. */
export async function call(path, { headers = {}, ...options } = {}) {
	const key = apiKey();
	let response;
	try {
		response = await fetch(new URL(path, BASE), {
			...options,
			credentials: "omit", // no cookies, and no password that a browser has stored
			cache: "no-store",
			headers: key ? { ...headers, Authorization: `Bearer ${key}` } : headers,
		});
	} catch (error) {
		if (error.name === "AbortError") throw error;
		throw new ApiError(0, "no_connection", "The server cannot be reached.");
	}
	if (response.ok) return response;
	const error = (await response.json().catch(() => ({}))).error ?? {};
	const seconds = Number(response.headers.get("retry-after")) || null;
	throw new ApiError(response.status, error.code ?? "", error.message ?? response.statusText, seconds);
}

/** Returns the names of the served model. */
export async function models() {
	const found = await (await call("v1/models")).json();
	return found.data.map((one) => one.id);
}

/** Begins an answer. A second call with the same key and body joins the first one's answer. */
export function begin(body, idempotencyKey, signal) {
	const headers = { "Content-Type": "application/json", "Idempotency-Key": idempotencyKey, "X-Resumable": "1" };
	return call("v1/chat/completions", { method: "POST", body: JSON.stringify(body), headers, signal });
}

/** Continues an answer after the event `last`. */
export function resume(last, signal) {
	return call(`v1/streams/${last.split(":")[0]}`, { headers: { "Last-Event-ID": last }, signal });
}

/** Ends a request that would run on for a while without its reader. */
export function cancel(requestId) {
	return call(`v1/streams/${requestId}`, { method: "DELETE", keepalive: true }).catch(() => {}); // it may have ended
}

/** Opens the stream of the engines' state. */
export const engineState = (signal) => call("engine/state", { signal });
