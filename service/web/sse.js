/**
 * Yields the events {id, data} and comments {comment} of a fetch response; EventSource cannot send an API key.
 * An event without an id gets the last one. Throws what the connection throws.
 */
export async function* events(body) {
	const reader = body.pipeThrough(new TextDecoderStream()).getReader();
	let left = "";
	let id = null;
	let data = [];
	try {
		for (;;) {
			const { value, done } = await reader.read();
			if (done) return;
			const lines = (left + value).split("\n");
			left = lines.pop();
			for (const line of lines) {
				if (line === "") {
					if (data.length) yield { id, data: data.join("\n") };
					data = [];
				} else if (line.startsWith(":")) yield { comment: line.slice(1).trim() };
				else if (line.startsWith("id: ")) id = line.slice(4);
				else if (line.startsWith("data: ")) data.push(line.slice(6));
			}
		}
	} finally {
		reader.cancel().catch(() => {});
	}
}
