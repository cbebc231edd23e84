# opencode, with a provider of its own kind for servers of OpenAI's chat completions.
. "$(dirname "$0")/note.sh"
cat > opencode.json <<CONFIG
{"provider": {"strop": {"npm": "@ai-sdk/openai-compatible",
                        "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY"},
                        "models": {"$STROP_MODEL": {"limit": {"context": 900000, "output": 8000}}}}},
 "permission": {"bash": "allow"}}
CONFIG
say "$(opencode run -m "strop/$STROP_MODEL" "$first")"
say "$(opencode run -m "strop/$STROP_MODEL" --continue "$second")"
