// Vercel's AI SDK: --compatible for its provider of other servers' chat completions, --chat for OpenAI's, --anthropic for
// Anthropic's, and without any its default, OpenAI's responses.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";
import { QUESTIONS, SYSTEM, TYPED, add, lookup, model as name, say, stream, typed } from "./cities.mjs";

const has = (option) => process.argv.includes(option);
const { OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey, ANTHROPIC_BASE_URL } = process.env;
const model = has("--anthropic")
  ? createAnthropic({ baseURL: `${ANTHROPIC_BASE_URL}/v1` })(name)
  : has("--compatible")
    ? createOpenAICompatible({ name: "strop", baseURL, apiKey, supportsStructuredOutputs: true })(name)
    : has("--chat")
      ? createOpenAI({ baseURL }).chat(name)
      : createOpenAI({ baseURL })(name);
const tools = {
  lookup: tool({
    description: "Look up how many people live in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: lookup,
  }),
  add: tool({
    description: "Add two numbers.",
    inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
    execute: add,
  }),
};
const messages = [];
for (const content of QUESTIONS) {
  messages.push({ role: "user", content });
  const asked = { model, instructions: SYSTEM, messages, tools, stopWhen: isStepCount(5) };
  if (stream) {
    const result = streamText(asked);
    await result.consumeStream();
    messages.push(...(await result.responseMessages));
    say(await result.text);
  } else {
    const result = await generateText(asked);
    messages.push(...result.responseMessages);
    say(result.text);
  }
}
await typed(async () => {
  const schema = z.object({ bigger: z.enum(["Rome", "Oslo"]), sure: z.boolean() });
  return (await generateText({ model, prompt: TYPED, output: Output.object({ schema }) })).output;
});
