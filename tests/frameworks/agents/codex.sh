# Codex, which is told the address in its configuration.
. "$(dirname "$0")/note.sh"
mkdir -p "$HOME/.codex" && cat > "$HOME/.codex/config.toml" <<CONFIG
model = "$STROP_MODEL"
model_provider = "strop"
[model_providers.strop]
name = "strop"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
CONFIG
run="--dangerously-bypass-approvals-and-sandbox --output-last-message said"
codex exec $run "$first" && say "$(cat said)"
codex exec resume --last $run "$second" && say "$(cat said)"
