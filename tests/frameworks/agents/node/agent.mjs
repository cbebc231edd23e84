// OpenAI's client for Node, with its own runner of tools: the agent of cities.py in another language.
import OpenAI from "openai";

const stream = process.argv.includes("--stream");
const people = { Rome: 2748109, Oslo: 709037 };

const tool = (name, description, properties, run) => ({
  type: "function",
  function: {
    name,
    description,
    parameters: { type: "object", properties, required: Object.keys(properties) },
    parse: JSON.parse,
    function: run,
  },
});
const tools = [
  tool("lookup", "Look up how many people live in a city.", { city: { type: "string" } }, ({ city }) => people[city]),
  tool("add", "Add two numbers.", { a: { type: "integer" }, b: { type: "integer" } }, ({ a, b }) => a + b),
];

const client = new OpenAI();
let messages = [
  { role: "system", content: "You answer questions about cities. Look things up and calculate with the tools." },
];
for (const question of ["How many people live in Rome and Oslo together?", "Which of the two is bigger?"]) {
  messages.push({ role: "user", content: question });
  const runner = client.chat.completions.runTools({ model: process.env.STROP_MODEL, messages, tools, stream });
  console.log("answer:", await runner.finalContent());
  messages = runner.messages;
}
