"""LangGraph with LangChain's OpenAI model: the graph of a model and its tools, with a checkpointer as memory. With
`--responses` through the responses API."""

import sys

from cities import MODEL, QUESTIONS, STREAM, SYSTEM, add, lookup, say
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

tools = [lookup, add]
model = ChatOpenAI(model=MODEL, use_responses_api="--responses" in sys.argv).bind_tools(tools)


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
