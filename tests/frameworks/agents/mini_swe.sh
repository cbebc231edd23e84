# mini-swe-agent, by way of LiteLLM.
. "$(dirname "$0")/note.sh"
export MSWEA_CONFIGURED=true MSWEA_SILENT_STARTUP=1 MSWEA_COST_TRACKING=ignore_errors
mini --yolo --exit-immediately --model "openai/$STROP_MODEL" --task "$first" --output said.json
say "$(python -c 'import json; print(json.load(open("said.json"))["info"]["submission"])')"
