// What the agents of this folder have in common, as ../cities.py.
export const model = process.env.STROP_MODEL;
export const stream = process.argv.includes("--stream");
export const SYSTEM = "You answer questions about cities. Look things up and calculate with the tools, never from memory.";
export const QUESTIONS = ["How many people live in Rome and Oslo together?", "Which of the two is bigger?"];
export const TYPED = "Name the bigger of Rome and Oslo, and say whether you are sure.";
const PEOPLE = { Rome: 2748109, Oslo: 709037 };
export const lookup = ({ city }) => PEOPLE[city];
export const add = ({ a, b }) => a + b;
export const say = (answer) => console.log("answer:", answer);
export async function typed(ask) {
  try {
    const { bigger, sure } = await ask();
    if (!(bigger in PEOPLE) || typeof sure !== "boolean") throw new Error(`no verdict: ${bigger}, ${sure}`);
    console.log("typed:", JSON.stringify({ bigger, sure }));
  } catch (error) {
    console.log("refused:", String(error).replaceAll("\n", " ").slice(0, 600));
  }
}
