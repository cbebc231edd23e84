#!/bin/sh
# The two settings, and the model's name: what a runner gives, under the names that Youtu-agent reads.
export UTU_LLM_BASE_URL="$OPENAI_BASE_URL" UTU_LLM_API_KEY="$OPENAI_API_KEY" UTU_LLM_MODEL="$STROP_MODEL"
unset OPENAI_BASE_URL OPENAI_API_KEY
exec "$@"
