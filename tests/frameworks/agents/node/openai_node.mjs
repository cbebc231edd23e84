// OpenAI's client for Node: responses by hand, and answers of a type.
import OpenAI from "openai";
import { zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { QUESTIONS, SYSTEM, TYPED, add, lookup, model, say, stream, typed } from "./cities.mjs";

const functions = { lookup, add };
const tool = (name, description, properties) => ({
  type: "function",
  name,
  description,
  strict: false,
  parameters: { type: "object", properties, required: Object.keys(properties) },
});
const tools = [
  tool("lookup", "Look up how many people live in a city.", { city: { type: "string" } }),
  tool("add", "Add two numbers.", { a: { type: "integer" }, b: { type: "integer" } }),
];
const client = new OpenAI();
const input = [];
for (const content of QUESTIONS) {
  input.push({ role: "user", content });
  for (;;) {
    const asked = { model, instructions: SYSTEM, input, tools };
    const response = stream
      ? await client.responses.stream(asked).finalResponse()
      : await client.responses.create(asked);
    input.push(...response.output);
    const calls = response.output.filter((item) => item.type === "function_call");
    if (!calls.length) {
      say(response.output_text);
      break;
    }
    for (const { call_id, name, arguments: given } of calls)
      input.push({ type: "function_call_output", call_id, output: String(functions[name](JSON.parse(given))) });
  }
}
await typed(async () => {
  const Verdict = z.object({ bigger: z.enum(["Rome", "Oslo"]), sure: z.boolean() });
  const response = await client.responses.parse({ model, input: TYPED, text: { format: zodTextFormat(Verdict, "verdict") } });
  return response.output_parsed;
});
