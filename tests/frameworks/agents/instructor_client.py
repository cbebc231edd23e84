"""Instructor, in its modes: TOOLS, or with `--json` JSON, with `--schema` JSON_SCHEMA."""

import sys

import instructor
from cities import MODEL
from openai import OpenAI
from verdict import QUESTION, Verdict, show, typed

mode = instructor.Mode.JSON if "--json" in sys.argv else instructor.Mode.TOOLS
mode = instructor.Mode.JSON_SCHEMA if "--schema" in sys.argv else mode
client = instructor.from_openai(OpenAI(), mode=mode)
with typed():
    asked = [{"role": "user", "content": QUESTION}]
    show(client.chat.completions.create(model=MODEL, messages=asked, response_model=Verdict, max_retries=1))
