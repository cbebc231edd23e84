"""CrewAI: a crew of one with a task for each question, the second with the first one's answer as context."""

import os

from cities import MODEL, QUESTIONS, STREAM, SYSTEM, TYPED, add, lookup, say
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from verdict import QUESTION, Verdict, show, typed

llm = LLM(MODEL, custom_openai=True, base_url=os.environ["OPENAI_BASE_URL"], stream=STREAM)
agent = Agent(
    role="Geographer",
    goal=SYSTEM,
    backstory="You know your way around cities.",
    tools=[tool("lookup")(lookup), tool("add")(add)],
    llm=llm,
)
first, second = QUESTIONS
people = Task(description=first, expected_output="A sentence with the number.", agent=agent)
bigger = Task(description=second, expected_output="A sentence with the city.", agent=agent, context=[people])
result = Crew(agents=[agent], tasks=[people, bigger]).kickoff()
for output in result.tasks_output:
    say(output.raw)
if TYPED:
    with typed():
        agent = Agent(role="Geographer", goal="Answer.", backstory="You know cities.", llm=llm)
        task = Task(description=QUESTION, expected_output="A verdict.", agent=agent, output_pydantic=Verdict)
        show(Crew(agents=[agent], tasks=[task]).kickoff().pydantic)
