// Anthropic's client for Node, with its runner of tools.
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";
import { QUESTIONS, SYSTEM, TYPED, add, lookup, model, say, stream, typed } from "./cities.mjs";

const tools = [
  betaZodTool({
    name: "lookup",
    description: "Look up how many people live in a city.",
    inputSchema: z.object({ city: z.string() }),
    run: (given) => String(lookup(given)),
  }),
  betaZodTool({
    name: "add",
    description: "Add two numbers.",
    inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
    run: (given) => String(add(given)),
  }),
];
const client = new Anthropic();
let messages = [];
for (const content of QUESTIONS) {
  messages.push({ role: "user", content });
  const runner = client.beta.messages.toolRunner({ model, max_tokens: 1000, system: SYSTEM, messages, tools, stream });
  const message = await runner.runUntilDone();
  messages = [...runner.params.messages];
  if (messages.at(-1).role !== "assistant") messages.push({ role: "assistant", content: message.content });
  say(message.content.at(-1).text);
}
await typed(async () => {
  const Verdict = z.object({ bigger: z.enum(["Rome", "Oslo"]), sure: z.boolean() });
  const message = await client.messages.parse({
    model,
    max_tokens: 1000,
    messages: [{ role: "user", content: TYPED }],
    output_config: { format: zodOutputFormat(Verdict) },
  });
  return message.parsed_output;
});
