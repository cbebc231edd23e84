"""Google's Agent Development Kit, with its model by way of LiteLLM."""

import asyncio

from cities import MODEL, QUESTIONS, SYSTEM, add, lookup, say
from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai.types import Content, Part
from verdict import QUESTION, Verdict, show, typed


async def ask(runner: InMemoryRunner, session: str, question: str) -> str:
    asked, said = Content(role="user", parts=[Part(text=question)]), ""
    async for event in runner.run_async(user_id="u", session_id=session, new_message=asked):
        if event.is_final_response() and event.content:
            said = "".join(part.text or "" for part in event.content.parts)
    return said


async def main() -> None:
    model = LiteLlm(model=f"openai/{MODEL}")
    runner = InMemoryRunner(LlmAgent(name="cities", model=model, instruction=SYSTEM, tools=[lookup, add]))
    session = await runner.session_service.create_session(app_name=runner.app_name, user_id="u")
    for question in QUESTIONS:
        say(await ask(runner, session.id, question))
    with typed():
        judge = InMemoryRunner(LlmAgent(name="judge", model=model, output_schema=Verdict))
        session = await judge.session_service.create_session(app_name=judge.app_name, user_id="u")
        show(await ask(judge, session.id, QUESTION))


asyncio.run(main())
