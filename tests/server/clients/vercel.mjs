// What programs do with the Vercel AI SDK; prints one JSON object. Run in the folder of its packages.
// Arguments: a server whose answers are scripted, with reasoning, and one whose model is free.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(`${process.cwd()}/`);
const load = async (name) => import(pathToFileURL(require.resolve(name)));
const { generateObject, generateText, stepCountIs, streamObject, streamText, tool } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { z } = await load("zod");

const [scripted, free] = process.argv.slice(2);
const prompt = "What is the weather in Oslo?";
const modelsOf = (url) => {
  const baseURL = `${url}/v1`;
  const model = "mlx-paged-demo";
  const openai = createOpenAI({ baseURL, apiKey: "none" });
  const compatible = createOpenAICompatible({
    name: "mlx-paged", baseURL, includeUsage: true, supportsStructuredOutputs: true,
  });
  return {
    compatible: compatible(model), chat: openai.chat(model), responses: openai.responses(model),
  };
};
const forecast = z.strictObject({
  sky: z.enum(["clear", "cloudy"]).nullable(),
  days: z.array(z.boolean()).max(2),
});
const tools = {
  get_weather: tool({
    description: "The weather of a city.",
    inputSchema: z.strictObject({ city: z.enum(["Oslo", "Rome"]) }),
    execute: async ({ city }) => `It rains in ${city}.`,
  }),
};
const common = { maxRetries: 0, prompt };
const calls = (found) => found.map(({ toolName, input }) => ({ name: toolName, input }));
const found = {};

const report = (steps) => steps.map((step) => ({
  text: step.text, reasoning: step.reasoningText, calls: calls(step.toolCalls),
  results: step.toolResults.map(({ output }) => output), reason: step.finishReason,
}));

// A tool is called, and its result answered: two answers each.
for (const [name, model] of Object.entries(modelsOf(scripted))) {
  const providerOptions = { openai: { reasoningSummary: "auto", forceReasoning: true } };
  const asked = { ...common, model, tools, stopWhen: stepCountIs(3), ...(
    name === "responses" ? { providerOptions } : {}
  ) };
  const whole = await generateText(asked);
  const errors = [];
  const stream = streamText({ ...asked, onError: ({ error }) => errors.push(String(error)) });
  const types = new Set();
  for await (const part of stream.fullStream) types.add(part.type);
  found[name] = {
    whole: report(whole.steps), streamed: report(await stream.steps), types: [...types],
    usage: await stream.totalUsage, errors,
  };
}

// Forced by grammar. One call, because a free model would go on to the most that one answer may have.
const oneCall = {
  openai: { parallelToolCalls: false }, "mlx-paged": { parallel_tool_calls: false },
};
for (const [name, model] of Object.entries(modelsOf(free))) {
  const idle = { get_weather: tool({ ...tools.get_weather, execute: undefined }) };
  const forced = [];
  for (const toolChoice of ["required", { type: "tool", toolName: "get_weather" }]) {
    const options = { ...common, model, tools: idle, toolChoice, providerOptions: oneCall };
    const chosen = (await generateText(options)).toolCalls;
    forced.push(calls(chosen));
  }
  const asked = { ...common, model, schema: forecast };
  const { object } = await generateObject(asked);
  const errors = found[name].errors;
  const stream = streamObject({ ...asked, onError: ({ error }) => errors.push(String(error)) });
  let partial = 0;
  for await (const _ of stream.partialObjectStream) partial += 1;
  Object.assign(found[name], { forced, object, partial, streamedObject: await stream.object });
}
console.log(JSON.stringify(found));
