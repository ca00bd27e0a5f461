/** Calls of the public API, the page's only access to the server. */

import { html, nothing } from "./vendor/lit-html-3.3.3.js";

const KEY = "quire.key"; // the API key's name in sessionStorage, which no other tab can read
const BASE = new URL(".", document.baseURI); // with the path prefix, if any

/** The server refused the request, or did not answer (status 0). `retryAfterS` may be missing. */
export class ApiError extends Error {
	constructor(status, code, message, retryAfterS) {
		super(message);
		Object.assign(this, { status, code, retryAfterS });
	}
}

export const errorNote = (error) =>
	error ? html`<p class="error" role="alert"><strong>${error.code}</strong> ${error.message}</p>` : nothing;

export const apiKey = () => sessionStorage.getItem(KEY) ?? "";

export const setApiKey = (key) => sessionStorage.setItem(KEY, key);

/** Returns the response to a request. Throws ApiError if it is no success. */
export async function call(path, { headers = {}, ...options } = {}) {
	const key = apiKey();
	let response;
	try {
		response = await fetch(new URL(path, BASE), {
			...options,
			credentials: "omit", // no cookies, no stored password
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

export async function models() {
	const found = await (await call("v1/models")).json();
	return found.data.map((one) => one.id);
}

/** Starts an answer. A second call with the same idempotency key and body joins it. */
export function begin(body, idempotencyKey, signal) {
	const headers = { "Content-Type": "application/json", "Idempotency-Key": idempotencyKey, "X-Resumable": "1" };
	return call("v1/chat/completions", { method: "POST", body: JSON.stringify(body), headers, signal });
}

export function resume(last, signal) {
	return call(`v1/streams/${last.split(":")[0]}`, { headers: { "Last-Event-ID": last }, signal });
}

export function cancel(requestId) {
	return call(`v1/streams/${requestId}`, { method: "DELETE", keepalive: true }).catch(() => {}); // it may have ended
}
