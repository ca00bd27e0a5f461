/**
 * Chats as trees: every edit and every new answer is a branch, and nothing is overwritten.
 *
 *     root ─ "Hello" ─┬─ answer
 *                     └─ answer (regenerated) ─ "And then?" ─ answer
 *          └ "Hi" (edited) ─ answer
 *
 * A node is {id, parent, role, text} or {id, parent, role, answer, picked}. `chosen`: the child of each node that the
 * page shows. Chats live in sessionStorage, one entry each: they survive a reload and end with the tab.
 */

const LIST = "quire.chats";
const CHAT = "quire.chat.";
const SAVE_MS = 250;

let counter = 0;
const newId = () => `${Date.now().toString(36)}${(counter++).toString(36)}`;

export const newChat = () => ({ id: newId(), nodes: {}, chosen: {} });

/** Adds a node under `parent` ("" is the root) and shows it. */
export function add(chat, parent, fields) {
	const node = { id: newId(), parent, ...fields };
	chat.nodes[node.id] = node;
	chat.chosen[parent] = node.id;
	return node;
}

/** Returns the nodes that the page shows, oldest first. */
export function path(chat) {
	const found = [];
	for (let id = chat.chosen[""]; id; id = chat.chosen[id]) found.push(chat.nodes[id]);
	return found;
}

export const siblings = (chat, node) => Object.values(chat.nodes).filter((other) => other.parent === node.parent);

export const answers = (chat) => Object.values(chat.nodes).flatMap(({ answer }) => answer ?? []);

export const title = (chat) => Object.values(chat.nodes)[0]?.text.slice(0, 60) || "New chat";

/** Returns the chat up to and including the node `last`, in the API's format. */
export function messages(chat, last, systemPrompt) {
	const found = [];
	for (let node = chat.nodes[last]; node; node = chat.nodes[node.parent]) {
		found.unshift(node.answer ? answerMessage(node.answer.choices[node.picked]) : { role: "user", content: node.text });
	}
	return systemPrompt ? [{ role: "system", content: systemPrompt }, ...found] : found;
}

function answerMessage({ text, reasoning, calls }) {
	const message = { role: "assistant", content: text };
	if (reasoning) message.reasoning_content = reasoning;
	if (calls.length) message.tool_calls = calls.map(({ id, ...made }) => ({ id, type: "function", function: made }));
	return message;
}

/** Returns the stored chats, the newest first, and the id of the one that was open. */
export function restore() {
	try {
		const { ids, open } = JSON.parse(sessionStorage.getItem(LIST)) ?? { ids: [], open: null };
		return { chats: ids.map((id) => JSON.parse(sessionStorage.getItem(CHAT + id))).filter(Boolean), open };
	} catch {
		return { chats: [], open: null }; // another version's
	}
}

const unsaved = new Set();
let timer = 0;

/** Stores a chat within SAVE_MS. */
export function save(chat) {
	unsaved.add(chat);
	timer ||= setTimeout(flush, SAVE_MS);
}

export function flush() {
	clearTimeout(timer);
	timer = 0;
	for (const chat of unsaved) write(CHAT + chat.id, chat);
	unsaved.clear();
}

export const saveList = (chats, open) => write(LIST, { ids: chats.map(({ id }) => id), open });

/** If storage is full, token probabilities are left out; if that is not enough, the old entry stays. */
function write(name, value) {
	for (const replacer of [null, (key, part) => (key === "logprobs" ? [] : part)]) {
		try {
			return sessionStorage.setItem(name, JSON.stringify(value, replacer));
		} catch {}
	}
}

export function forget(chat) {
	unsaved.delete(chat);
	sessionStorage.removeItem(CHAT + chat.id);
}
