// LangChain.js: OpenAI's model, or with --anthropic Anthropic's, with tools by hand.
import { ChatAnthropic } from "@langchain/anthropic";
import { HumanMessage, SystemMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";
import { QUESTIONS, SYSTEM, TYPED, add, lookup, model as name, say, typed } from "./cities.mjs";

const model = process.argv.includes("--anthropic")
  ? new ChatAnthropic({ model: name, maxTokens: 1000 })
  : new ChatOpenAI({ model: name });
const tools = {
  lookup: tool(async (given) => String(lookup(given)), {
    name: "lookup",
    description: "Look up how many people live in a city.",
    schema: z.object({ city: z.string() }),
  }),
  add: tool(async (given) => String(add(given)), {
    name: "add",
    description: "Add two numbers.",
    schema: z.object({ a: z.number().int(), b: z.number().int() }),
  }),
};
const bound = model.bindTools(Object.values(tools));
const messages = [new SystemMessage(SYSTEM)];
for (const question of QUESTIONS) {
  messages.push(new HumanMessage(question));
  for (;;) {
    const said = await bound.invoke(messages);
    messages.push(said);
    if (!said.tool_calls?.length) {
      say(said.text);
      break;
    }
    for (const call of said.tool_calls) messages.push(await tools[call.name].invoke(call));
  }
}
await typed(async () => {
  const Verdict = z.object({ bigger: z.enum(["Rome", "Oslo"]), sure: z.boolean() });
  return model.withStructuredOutput(Verdict).invoke(TYPED);
});
