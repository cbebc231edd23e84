"""Talk to a policy, or to a run's agent, through the same gateway, sessions and records as in training.

    async with open_chat(config, folder) as session:       the model is loaded, a gateway answers on a loopback port
        chat = Chat(session, tools=schemas, run=run)       one conversation: a rollout with one attempt
        answer = await chat.ask("What is 12 + 30?", show)  `show` hears of everything as it happens

    async with open_chat(config, folder, agent=True) as session:
        await AgentChat(session, example).ask("What is 12 + 30?", show)  one rollout of the run's own agent

Nothing is trained: the process that holds the weights has no learner. What is said is kept in the folder's store, where
`strop rollouts FOLDER` finds it.

Left out: going on with a conversation of an earlier chat.
"""

from strop.run.chat.agent import AgentChat
from strop.run.chat.conversation import Chat
from strop.run.chat.session import (
    ChatAnswer,
    ChatSession,
    Show,
    Shown,
    TextDelta,
    ToolCallDone,
    ToolCallStarted,
    TurnRecorded,
    open_chat,
)

__all__ = [
    "AgentChat",
    "Chat",
    "ChatAnswer",
    "ChatSession",
    "Show",
    "Shown",
    "TextDelta",
    "ToolCallDone",
    "ToolCallStarted",
    "TurnRecorded",
    "open_chat",
]
