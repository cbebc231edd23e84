# aider, which edits by text: no tools.
. "$(dirname "$0")/note.sh"
export AIDER_ANALYTICS=false AIDER_CHECK_UPDATE=false AIDER_SHOW_MODEL_WARNINGS=false AIDER_SHOW_RELEASE_NOTES=false
aider --model "openai/$STROP_MODEL" --yes-always --no-gitignore --edit-format diff --no-show-model-warnings \
    --message "Write owls in place of seventeen-owls." note.txt
say "$(cat note.txt)"
