// OpenAI Agents for Node: the responses API, or with --chat chat completions.
import { Agent, run, setOpenAIAPI, setTracingDisabled, tool } from "@openai/agents";
import { z } from "zod";
import { QUESTIONS, SYSTEM, TYPED, add, lookup, model, say, typed } from "./cities.mjs";

setTracingDisabled(true);
if (process.argv.includes("--chat")) setOpenAIAPI("chat_completions");
const tools = [
  tool({
    name: "lookup",
    description: "Look up how many people live in a city.",
    parameters: z.object({ city: z.string() }),
    execute: async (given) => String(lookup(given)),
  }),
  tool({
    name: "add",
    description: "Add two numbers.",
    parameters: z.object({ a: z.number().int(), b: z.number().int() }),
    execute: async (given) => String(add(given)),
  }),
];
const agent = new Agent({ name: "Cities", instructions: SYSTEM, model, tools });
let history = [];
for (const content of QUESTIONS) {
  const result = await run(agent, [...history, { role: "user", content }]);
  history = result.history;
  say(result.finalOutput);
}
await typed(async () => {
  const outputType = z.object({ bigger: z.enum(["Rome", "Oslo"]), sure: z.boolean() });
  return (await run(new Agent({ name: "Judge", model, outputType }), TYPED)).finalOutput;
});
