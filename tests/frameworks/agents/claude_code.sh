# Claude Code, headless. ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY are in the environment.
. "$(dirname "$0")/note.sh"
say "$(claude -p "$first" --model "$STROP_MODEL" --allowedTools 'Bash(cat:*)')"
say "$(claude -p "$second" --model "$STROP_MODEL" --continue)"
