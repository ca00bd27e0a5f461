/**
 * Markdown as models write it: headings, lists, tables, quotes, code, links, emphasis.
 *
 * Text is escaped before any tag is made, and DOMPurify lets only the tags below pass. So model output cannot execute,
 * even if one of the two is wrong. Images become links: no other server learns what was read.
 */

import "./vendor/dompurify-3.4.18.min.js";

const ALLOWED = {
	ALLOWED_TAGS:
		"a b blockquote br code del em h3 h4 h5 h6 hr li ol p pre span strong table tbody td th thead tr ul".split(" "),
	ALLOWED_ATTR: ["href", "start", "class", "title", "rel", "target"],
	ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
	RETURN_DOM_FRAGMENT: true,
};
DOMPurify.addHook("afterSanitizeAttributes", (node) => {
	if (node.tagName === "A") {
		node.setAttribute("target", "_blank");
		node.setAttribute("rel", "noopener noreferrer");
	}
});

const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
const escape = (text) => text.replace(/[&<>"']/g, (found) => ESCAPES[found]);

// While text is converted, a pause or code is its number between two characters that no text contains.
const PAUSE = /\uE000(\d+)\uE001/g;
const ASIDE = /\uE002(\d+)\uE003/g;
const clean = (text) => text.replace(/[\uE000-\uE003]/g, "\uFFFD");

/** Returns the text with a mark after each word at which the answer paused. */
function withPauses(text, pauses) {
	let found = "";
	let from = 0;
	pauses.forEach(({ at }, number) => {
		const [end] = /^[^ \n]* */.exec(text.slice(at));
		found += clean(text.slice(from, at + end.length)).replace(/(\n\s*)?$/, (lines) => `\uE000${number}\uE001${lines}`);
		from = at + end.length;
	});
	return found + clean(text.slice(from));
}

function showPause({ ms, why }) {
	const seconds = (ms / 1000).toFixed(1);
	return `<span class="pause" title="Paused for ${seconds} s: ${escape(why)}">paused ${seconds} s</span>`;
}

/** Shows a text in `container`. Blocks that did not change keep their nodes, so streaming stays cheap. */
export function showMarkdown(container, text, pauses = []) {
	const blocks = split(withPauses(text, pauses));
	const before = container.blocks ?? [];
	blocks.forEach((block, at) => {
		if (before[at] === block) return;
		const node = document.createElement("div");
		let html = toHtml(block);
		for (const sign of block.match(PAUSE) ?? []) if (!html.includes(sign)) html += sign; // the pause's line is hidden
		html = html.replace(PAUSE, (_, number) => showPause(pauses[number]));
		node.append(DOMPurify.sanitize(html, ALLOWED));
		if (at < container.childElementCount) container.children[at].replaceWith(node);
		else container.append(node);
	});
	while (container.childElementCount > blocks.length) container.lastElementChild.remove();
	container.blocks = blocks;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})/;

/** Cuts a text at blank lines outside of code. */
function split(text) {
	const blocks = [[]];
	let fence = null; // closing fence of the open code block
	for (const line of text.split("\n")) {
		const mark = FENCE.exec(line)?.[1];
		if (!fence && (mark || !line.trim())) blocks.push([]);
		if (fence || line.trim()) blocks.at(-1).push(line);
		if (!fence) fence = mark;
		else if (mark?.startsWith(fence)) {
			fence = null;
			blocks.push([]);
		}
	}
	return blocks.filter((lines) => lines.length).map((lines) => lines.join("\n"));
}

const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;

function toHtml(block) {
	if (FENCE.test(block)) return code(block);
	let lines = block.split("\n");
	let html = "";
	while (lines.length) {
		const [line, next] = lines;
		let taken = 1;
		const take = (pattern) => {
			taken = lines.findIndex((one) => !pattern.test(one)) >>> 0; // -1 becomes 2**32 - 1
			return lines.slice(0, taken);
		};
		const heading = /^(#{1,6})\s+(.*)$/.exec(line);
		if (heading) {
			const level = Math.min(6, heading[1].length + 2);
			html += `<h${level}>${inline(heading[2])}</h${level}>`;
		} else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) html += "<hr>";
		else if (/^\s*>/.test(line)) {
			const quoted = take(/^\s*>/).map((one) => one.replace(/^[\s>]+/, ""));
			html += `<blockquote>${toHtml(quoted.join("\n"))}</blockquote>`;
		} else if (ITEM.test(line)) html += list(take(/^(\s+\S|\s*([-*+]|\d{1,9}[.)])\s)/));
		else if (/\|/.test(line) && /^\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?$/.test(next?.replace(PAUSE, "").trim())) html += table(take(/\|/));
		else {
			while (taken < lines.length && !/^(#{1,6}\s|\s*>)/.test(lines[taken]) && !ITEM.test(lines[taken])) taken++;
			html += `<p>${lines.slice(0, taken).map(inline).join("<br>")}</p>`;
		}
		lines = lines.slice(taken);
	}
	return html;
}

function code(block) {
	const lines = block.split("\n");
	const mark = FENCE.exec(lines.shift())[1];
	if (lines.at(-1)?.trim().startsWith(mark)) lines.pop();
	return `<pre><code>${escape(lines.join("\n"))}</code></pre>`;
}

/** Items of equal indentation are one list; deeper lines belong to the item above them. */
function list(lines) {
	const [, indent, mark] = ITEM.exec(lines[0]);
	const items = [];
	for (const line of lines) {
		const item = ITEM.exec(line);
		if (item && item[1].length <= indent.length) items.push({ text: item[3], inner: [] });
		else items.at(-1).inner.push(line);
	}
	const inside = ({ text, inner }) => {
		const first = inner.findIndex((line) => ITEM.test(line));
		const more = first < 0 ? inner : inner.slice(0, first);
		return `${[text, ...more].map(inline).join("<br>")}${first < 0 ? "" : list(inner.slice(first))}`;
	};
	const html = items.map((item) => `<li>${inside(item)}</li>`).join("");
	return mark.length > 1 ? `<ol start="${parseInt(mark, 10)}">${html}</ol>` : `<ul>${html}</ul>`;
}

function table([head, , ...rest]) {
	const row = (line, tag) => {
		const cells = line.trim().replace(/^\||\|(?=(\uE000\d+\uE001)*$)/g, "").split("|");
		return `<tr>${cells.map((cell) => `<${tag}>${inline(cell.trim())}</${tag}>`).join("")}</tr>`;
	};
	return `<table><thead>${row(head, "th")}</thead><tbody>${rest.map((line) => row(line, "td")).join("")}</tbody></table>`;
}

const link = (label, url) => `<a href="${url.replace(PAUSE, "")}">${label}</a>`;

/** Converts emphasis, code and links of a line. Code and links go first: they contain no emphasis. */
function inline(line) {
	const parts = [];
	const aside = (html) => `\uE002${parts.push(html) - 1}\uE003`;
	const back = (html) => html.replace(ASIDE, (_, number) => back(parts[number]));
	const text = line.replace(/(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)/g, (_, mark, body) => aside(`<code>${escape(body.trim())}</code>`));
	const html = escape(text)
		.replace(/!?\[([^\][]*)\]\((https?:[^\s()]+|mailto:[^\s()]+)(?:\s[^)]*)?\)/g, (_, label, url) => aside(link(label || url, url)))
		.replace(/\bhttps?:\/\/[^\s<>()\uE000-\uE003]*[^\s<>()\uE000-\uE003.,;:!?&]/g, (url) => aside(link(url, url)))
		.replace(/\*\*(?=\S)(.+?)\*\*/g, "<strong>$1</strong>")
		.replace(/(?<![\w*])\*(?=\S)([^*]+?)\*(?!\w)/g, "<em>$1</em>")
		.replace(/(?<!\w)_(?=\S)([^_]+?)_(?!\w)/g, "<em>$1</em>")
		.replace(/~~(.+?)~~/g, "<del>$1</del>");
	return back(html);
}
