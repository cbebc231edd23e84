# Qwen Code. OPENAI_BASE_URL and OPENAI_API_KEY are in the environment.
. "$(dirname "$0")/note.sh"
export OPENAI_MODEL="$STROP_MODEL"
say "$(qwen --auth-type openai --approval-mode yolo -p "$first")"
say "$(qwen --auth-type openai --approval-mode yolo --continue -p "$second")"
