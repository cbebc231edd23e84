"""DSPy: a typed signature, with its chat adapter or, with `--json`, its JSON adapter."""

import os
import sys

import dspy
from cities import MODEL
from verdict import QUESTION, Verdict, show, typed

lm = dspy.LM(f"openai/{MODEL}", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
dspy.configure(lm=lm, adapter=dspy.JSONAdapter() if "--json" in sys.argv else dspy.ChatAdapter())


class Judge(dspy.Signature):
    """Answer about cities."""

    question: str = dspy.InputField()
    verdict: Verdict = dspy.OutputField()


with typed():
    show(dspy.Predict(Judge)(question=QUESTION).verdict)
