"""What agents act with, and loops that are agents already.

function ──tool──▶ Tool ─┐
MCP server ──mcp──▶ Tool ┴──▶ ToolAgent(tools, reward)            what happened, and what it was worth in the end
Environment(reset, step) ───▶ EnvironmentAgent(Environment)       what it meant, step by step

schema       a function's hints and docstring as JSON schema
tool         a function that a model may call; what goes wrong with a call is its result
toolbox      several of them, made for one rollout and closed behind it
mcp          the tools of MCP servers
episode      the loop itself: ask, run the calls, ask again, until a limit or an answer
agent        ToolAgent
environment  Environment, EnvironmentAgent
calling      plain functions of the user's, where many agents share an event loop
python       the code interpreter as a tool; sandbox/ has the walls around it
search/      an index over a corpus, its server, and the tools that ask it
sql          run_query: a SELECT on a SQLite file, and nothing else
"""
