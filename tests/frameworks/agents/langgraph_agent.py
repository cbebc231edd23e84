"""LangGraph with LangChain's OpenAI model: the graph of a model and its tools, with a checkpointer as memory. With
`--responses` through the responses API, with `--anthropic` with LangChain's model for Anthropic's. `--tool` asks for an
answer of a type by a tool."""

import sys

from cities import MODEL, QUESTIONS, STREAM, SYSTEM, TYPED, add, lookup, say
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from verdict import QUESTION, Verdict, show, typed

tools = [lookup, add]
if "--anthropic" in sys.argv:
    plain = ChatAnthropic(model=MODEL, max_tokens=1000)
else:
    plain = ChatOpenAI(model=MODEL, use_responses_api="--responses" in sys.argv)
model = plain.bind_tools(tools)


def call_model(state: MessagesState) -> dict:
    return {"messages": [model.invoke([("system", SYSTEM), *state["messages"]])]}


builder = StateGraph(MessagesState)
builder.add_node("model", call_model)
builder.add_node("tools", ToolNode(tools))
builder.add_edge(START, "model")
builder.add_conditional_edges("model", tools_condition)
builder.add_edge("tools", "model")
graph = builder.compile(checkpointer=InMemorySaver())

config = {"configurable": {"thread_id": "1"}}
for question in QUESTIONS:
    asked = {"messages": [("user", question)]}
    if STREAM:
        for _chunk in graph.stream(asked, config, stream_mode="messages"):
            pass
    else:
        graph.invoke(asked, config)
    say(graph.get_state(config).values["messages"][-1].text)
if TYPED:
    with typed():
        how = "function_calling" if "--tool" in sys.argv else "json_schema"
        show(plain.with_structured_output(Verdict, method=how).invoke(QUESTION))
