"""What agents use: the means that recipes and users hand to a `ToolAgent`, or to an agent of their own.

python       a code interpreter as a tool; sandbox/ isolates it
search/      an index over a corpus, its server, and the tools that query it
sql          run_query: a SELECT on a SQLite file, and nothing else

The decorator `strop.tool`, tool agents, environments and MCP servers are in strop.agent.
"""
