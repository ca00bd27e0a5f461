/** Server-sent events of a fetch response. EventSource would do, but it cannot send an API key. */

/**
 * Yields {id, data} for each event and {comment} for each comment, until the stream ends.
 * An event's id stays in force for later events that have none. Throws what the connection throws.
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
		reader.cancel().catch(() => {}); // the connection may be gone already
	}
}
