# What the coding agents of this folder have in common: a folder with a note, two questions about it, and how answers
# are printed. They find the model where a runner says it is.
mkdir -p work && cd work && git init -q . && echo "seventeen-owls" > note.txt
first="What does note.txt say? Read it with a shell command."
second="Say it once more."
say() { echo "answer: $(echo "$1" | grep -v '^ *$' | tail -n 1)"; }
