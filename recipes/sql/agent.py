"""A LangGraph agent that answers a question with SQL: write, execute, check, rewrite.

    write ─▶ execute ─▶ check ─▶ END          the query gives rows, and the checker thinks that they answer the question
               │ ▲        │
               ▼ │        ▼
              rewrite ◀───┘                   it gives an error, or the checker says no; at most `rewrites` times

Writer, checker and rewriter ask the same model under names of their own: configs train the first and the last of them.
"""

import re
from typing import Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from worth import worth

from strop import Reward
from strop.tools.sql import run_query

WRITE = "Write one SQLite query that answers the question. Reply with the query only."
CHECK = "Does the result of the query answer the question? Reply with yes or no."
REWRITE = "{question}\nThis query is wrong:\n{query}\nIt gives:\n{result}\nWrite a query that is right."
AGAIN = "It gives:\n{result}\nThis is wrong too. Write a query that is right."

FLAGS = re.IGNORECASE | re.DOTALL


class State(TypedDict, total=False):
    question: str
    query: str
    result: str
    failed: bool
    right: bool
    queries: list[str]
    rewriting: list[Any]


class SQLAgent:
    def __init__(self, data: dict[str, Any], llm: Any) -> None:
        self.data = data
        self.writer = model(llm, "writer")
        self.checker = model(llm, "checker", max_tokens=4)
        self.rewriter = model(llm, "rewriter")
        system = f"{WRITE}\n\nTables:\n{data['schema']}"
        self.before = [("system", system)]
        for question, query in data["examples"]:
            self.before += [("user", question), ("assistant", query)]

    def write(self, state: State) -> State:
        said = self.writer.invoke([*self.before, ("user", state["question"])])
        return {"query": (query := read_query(said.text)), "queries": [query]}

    def execute(self, state: State) -> State:
        seen = run_query(state["query"], self.data["database"], rows=5, limit=300)
        return {"result": seen.text, "failed": not seen.ok}

    def check(self, state: State) -> State:
        asked = "Question: {question}\nQuery: {query}\nResult:\n{result}".format(**state)
        said = self.checker.invoke([("system", CHECK), ("user", asked)])
        return {"right": not re.match(r"\W*no\b", said.text, re.IGNORECASE)}

    def rewrite(self, state: State) -> State:
        before = state.get("rewriting")
        asked = AGAIN.format(**state) if before else REWRITE.format(**state)
        messages = [*(before or self.before), ("user", asked)]
        said = self.rewriter.invoke(messages)
        query = read_query(said.text)
        return {"query": query, "queries": [*state["queries"], query], "rewriting": [*messages, said]}

    def after_execute(self, state: State) -> str:
        if len(state["queries"]) > self.data["rewrites"]:
            return END
        return "rewrite" if state["failed"] else "check"

    def graph(self) -> Any:
        builder = StateGraph(State)
        for node in (self.write, self.execute, self.check, self.rewrite):
            builder.add_node(node.__name__, node)
        builder.add_edge(START, "write")
        builder.add_edge("write", "execute")
        builder.add_conditional_edges("execute", self.after_execute, ["rewrite", "check", END])
        builder.add_conditional_edges("check", lambda state: END if state["right"] else "rewrite", ["rewrite", END])
        builder.add_edge("rewrite", "execute")
        return builder.compile()


def model(llm: Any, name: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(model=llm.model, base_url=llm.as_agent(name).base_url, api_key=llm.api_key, **options)


def read_query(text: str) -> str:
    """The query within what a model said.

    >>> read_query("Here it is:\\n```sql\\nSELECT name\\nFROM singer;\\n```\\nIt gives names.")
    'SELECT name\\nFROM singer'
    >>> read_query("You can answer it with this one: SELECT name FROM singer WHERE name = 'a;b'; It gives one.")
    "SELECT name FROM singer WHERE name = 'a;b'"
    >>> read_query("```SELECT name\\n\\nFROM singer```"), read_query("WITH a(x) AS (SELECT 1) SELECT x FROM a")
    ('SELECT name\\nFROM singer', 'WITH a(x) AS (SELECT 1) SELECT x FROM a')
    >>> read_query("I do not know.")
    ''
    """
    if fenced := re.search(r"```(?:sql\w*\b)?(.*?)(?:```|$)", text, FLAGS):
        text = re.sub(r"\n\s*\n", "\n", fenced[1])
    begins = r"(?:select\b|with\s+(?:recursive\s+)?\w+\s*(?:\([^)]*\)\s*)?\bas\s*\()"
    found = re.search(rf"(?:^|:)\s*({begins}.*)", text, FLAGS | re.MULTILINE) or re.search(
        rf"\b({begins}.*)", text, FLAGS
    )
    quoted = re.match(r"""(?:'[^']*'|"[^"]*"|[^;])*""", found[1].split("\n\n")[0]) if found else None
    return quoted[0].strip() if quoted else ""


def solve(task: Any, llm: Any) -> list[Reward]:
    """The last query is what the rollout is worth. The first one is the writer's own doing, and counts for it alone."""
    done = SQLAgent(task.data, llm).graph().invoke({"question": task.data["question"]})
    golden, database = task.data["query"], task.data["database"]
    first, last = (worth(query, golden, database) for query in (done["queries"][0], done["query"]))
    return [
        Reward(name="reward", value=last),
        Reward(name="match", value=float(last == 1.0)),
        Reward(name="written", value=first, agent="writer"),
    ]
