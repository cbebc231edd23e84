"""Magentic: chats whose answers are calls of functions, and answers of a type."""

from cities import MODEL, QUESTIONS, SYSTEM, add, lookup, say
from magentic import Chat, FunctionCall, OpenaiChatModel, SystemMessage, UserMessage
from verdict import QUESTION, Verdict, show, typed

model = OpenaiChatModel(MODEL)
chat = Chat([SystemMessage(SYSTEM)], functions=[lookup, add], output_types=[str, FunctionCall], model=model)
for question in QUESTIONS:
    chat = chat.add_user_message(question).submit()
    while isinstance(chat.last_message.content, FunctionCall):
        chat = chat.exec_function_call().submit()
    say(chat.last_message.content)
with typed():
    show(Chat([UserMessage(QUESTION)], output_types=[Verdict], model=model).submit().last_message.content)
