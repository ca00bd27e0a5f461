// The AI SDK's providers against one server: a chat of two turns, a loop with a shell tool, an object, the reasoning.
// node ai_sdk.mjs URL MODEL PROVIDER   prints one line of JSON
import { execSync } from "node:child_process";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name, provider] = process.argv.slice(2);
const options = { baseURL: `${url}/v1`, apiKey: "none" };
const models = {
  responses: () => createOpenAI(options)(name),
  chat: () => createOpenAI(options).chat(name),
  compatible: () => createOpenAICompatible({ ...options, name: "quire", supportsStructuredOutputs: true })(name),
  anthropic: () => createAnthropic(options)(name),
};
const model = models[provider]();
const maxRetries = 0;
const shell = tool({
  description: "Runs a command.",
  inputSchema: z.object({ command: z.string() }),
  execute: async ({ command }) => execSync(command, { encoding: "utf8" }),
});

const messages = [{ role: "user", content: "Hello" }];
const first = await generateText({ model, messages, maxRetries });
messages.push(...first.response.messages, { role: "user", content: "And again" });
const second = await generateText({ model, messages, maxRetries });

const loop = { model, tools: { run_shell: shell }, stopWhen: stepCountIs(4), maxRetries };
const whole = await generateText({ ...loop, prompt: "Make the file" });
const providerOptions = { openai: { reasoningSummary: "auto", forceReasoning: true } };
const stream = streamText({ ...loop, prompt: "Make the file", providerOptions });
let streamed = "";
for await (const part of stream.textStream) streamed += part;
const thoughts = (await stream.steps).map((step) => step.reasoningText ?? "");
// A chat goes on after its calls, too.
const later = [{ role: "user", content: "Make the file" }, ...whole.response.messages, { role: "user", content: "Again" }];
const third = await generateText({ model, messages: later, maxRetries });

const schema = z.object({ ages: z.record(z.string(), z.string()) });
const { object } = await generateObject({ model, schema, prompt: "Ages?", maxRetries });
console.log(JSON.stringify({ first: first.text, second: second.text, whole: whole.text, streamed, thoughts, third: third.text, object }));
