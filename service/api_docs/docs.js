/** The API reference at /docs: draws what /openapi.json describes. */

import { call, errorNote } from "../web/api.js";
import { html, render } from "../web/vendor/lit-html-3.3.3.js";

const link = (id, label = id) => html`<a href="#${id}">${label}</a>`;

/** Draws a type. A named one links to its fields. */
function type(schema) {
	if (schema.$ref) return link(schema.$ref.split("/").at(-1));
	if (schema.properties) return fields(schema);
	if (schema.items) return ["array of ", type(schema.items)];
	const parts = schema.anyOf?.map(type) ?? [schema.type ?? "any"].flat();
	return parts.map((part, at) => [at ? " or " : "", part]);
}

const fields = ({ properties, required = [] }) => html`<table>
	${Object.entries(properties).map(
		([name, schema]) => html`<tr>
			<th scope="row"><code>${name}</code></th>
			<td>${type(schema)}</td>
			<td>${required.includes(name) ? "Required. " : ""}${schema.description}</td>
		</tr>`,
	)}
</table>`;

const section = (id, title, body) => html`<section aria-labelledby=${id}><h2 id=${id}>${title}</h2>${body}</section>`;

const operation = ({ id, title, summary, security, requestBody, responses }) =>
	section(id, title, html`<p>${summary}.${security ? " Needs an API key." : ""}</p>
		<p>
			${requestBody ? ["Body: ", type(requestBody.content["application/json"].schema), ". "] : ""}
			Answer: ${Object.keys(responses[200]?.content ?? { "204, no body": 0 }).join(" or ")}.
		</p>`);

function page({ info, paths, components: { schemas } }) {
	const operations = Object.entries(paths).flatMap(([path, methods]) =>
		Object.entries(methods).map(([method, one]) => ({ id: one.operationId, title: `${method.toUpperCase()} ${path}`, ...one })),
	);
	return html`<header class="bar"><strong class="brand">Quire API ${info.version}</strong><a href="./">Chat</a></header>
		<div class="body">
			<nav class="text" aria-label="Endpoints"><ul>${operations.map(({ id, title }) => html`<li>${link(id, title)}</li>`)}</ul></nav>
			<main class="text" tabindex="-1">
				<h1>Endpoints</h1>
				${operations.map(operation)}
				<h1>Types</h1>
				${Object.entries(schemas).map(([name, schema]) => section(name, name, fields(schema)))}
			</main>
		</div>`;
}

document.documentElement.dataset.theme = localStorage.getItem("quire.theme") ?? "auto";
const root = document.getElementById("app");
root.replaceChildren();
render(await call("openapi.json").then((found) => found.json()).then(page).catch(errorNote), root);
document.getElementById(location.hash.slice(1))?.scrollIntoView();
