// Completes, chats and streams with the openai Node client; prints what came as one JSON object.
import OpenAI from "openai";

const [baseURL, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "Tell me about the sea." }];
const common = { model: "builtin", temperature: 0, max_tokens: 12 };
const found = {};

found.models = (await client.models.list()).data.map((model) => model.id);
found.completion = await client.completions.create({ ...common, prompt: "The sea" });
found.chat = await client.chat.completions.create({ ...common, messages, logprobs: true, top_logprobs: 2 });

found.completionStream = [];
for await (const chunk of await client.completions.create({ ...common, prompt: "The sea", stream: true }))
  found.completionStream.push(chunk);

const stream = await client.chat.completions.create({
  ...common,
  messages,
  stream: true,
  stream_options: { include_usage: true },
});
found.chatStream = [];
for await (const chunk of stream) found.chatStream.push(chunk);

// the client's own assembler is strict about the order of chunks
const assembled = client.chat.completions.stream({ ...common, messages });
found.assembled = (await assembled.finalChatCompletion()).choices[0];

try {
  await client.chat.completions.create({ ...common, messages, tools: [{ type: "function", function: { name: "f" } }] });
} catch (error) {
  found.refusal = { kind: error.constructor.name, status: error.status, param: error.param, message: error.message };
}

const cut = await client.chat.completions.create({ ...common, messages, max_tokens: 1000, stream: true });
for await (const chunk of cut) if (chunk.choices[0].delta.content) break; // leaving the loop closes the connection
console.log(JSON.stringify(found));
