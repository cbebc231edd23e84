# pi, with a model of its own list of models.
. "$(dirname "$0")/note.sh"
mkdir -p "$HOME/.pi/agent" && cat > "$HOME/.pi/agent/models.json" <<CONFIG
{"providers": {"strop": {"baseUrl": "$OPENAI_BASE_URL", "api": "openai-completions", "apiKey": "OPENAI_API_KEY",
                         "models": [{"id": "$STROP_MODEL", "contextWindow": 900000, "maxTokens": 8000}]}}}
CONFIG
say "$(pi -p --provider strop --model "$STROP_MODEL" "$first")"
say "$(pi -p --provider strop --model "$STROP_MODEL" --continue "$second")"
