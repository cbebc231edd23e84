"""Outlines: a type's answer from a model behind OpenAI's API."""

import openai
import outlines
from cities import MODEL
from verdict import QUESTION, Verdict, show, typed

with typed():
    show(outlines.from_openai(openai.OpenAI(), MODEL)(QUESTION, Verdict))
