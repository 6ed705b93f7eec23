// What programs do with Ollama's JavaScript package; prints one JSON object. Run in the folder of the package.
// Argument: a server whose answers are scripted.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(`${process.cwd()}/`);
const { Ollama } = await import(pathToFileURL(require.resolve("ollama")));

const [host] = process.argv.slice(2);
const client = new Ollama({ host });
const model = "mlx-paged-demo";
const messages = [{ role: "user", content: "What is the weather in Oslo?" }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", description: "Weather", parameters } }];
const found = {};

found.whole = await client.chat({ model, messages, think: true });
found.called = await client.chat({ model, messages, tools });
const [call] = found.called.message.tool_calls;
const result = { role: "tool", tool_name: call.function.name, content: "It rains in Oslo." };
found.answered = await client.chat({ model, messages: [...messages, found.called.message, result], tools });

const pieces = [];
for await (const piece of await client.chat({ model, messages, stream: true, tools })) pieces.push(piece);
found.streamed = {
  text: pieces.map((piece) => piece.message.content).join(""),
  thinking: pieces.map((piece) => piece.message.thinking ?? "").join(""),
  calls: pieces.flatMap((piece) => piece.message.tool_calls ?? []),
  last: pieces.at(-1),
};

let prompt = "";
for await (const piece of await client.generate({ model, prompt: "Count.", stream: true })) prompt += piece.response;
found.prompt = prompt;
found.models = (await client.list()).models.map((each) => each.model);
found.loaded = (await client.ps()).models.map((each) => each.name);
found.shown = await client.show({ model });
found.version = (await client.version()).version;

found.errors = [];
for (const fail of [
  () => client.chat({ model: "llama3", messages }),
  () => client.chat({ model: "llama3", messages, stream: true }),
  () => client.embed({ model, input: "a" }),
  () => client.pull({ model: "llama3" }),
]) {
  try {
    await fail();
  } catch (error) {
    found.errors.push([error.name, error.status_code, error.message]);
  }
}
console.log(JSON.stringify(found));
