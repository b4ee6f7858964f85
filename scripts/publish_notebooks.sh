#!/usr/bin/env bash
# Pushes a branch that is the current commit and the chapters' notebooks of the built site on top of it.
# usage: scripts/publish_notebooks.sh BRANCH [REMOTE]
set -eu
branch=${1:?usage: scripts/publish_notebooks.sh BRANCH [REMOTE]}
remote=${2:-origin}
cd "$(dirname "$0")/.."
if ! ls _build/html/book/*.ipynb >/dev/null 2>&1; then
  echo "There are no notebooks in _build/html/book. Run: make book" >&2
  exit 1
fi
work=$(mktemp -d)
trap 'git worktree remove --force "$work" >/dev/null 2>&1 || rm -rf "$work"' EXIT
git worktree add -q --detach "$work" HEAD
cp _build/html/book/*.ipynb "$work/book/"
git -C "$work" add -f book/*.ipynb
git -C "$work" -c user.name="course_llm" -c user.email="course_llm@example.org" \
  commit -q --allow-empty -m "The chapters as notebooks"
git -C "$work" push -q --force "$remote" "HEAD:refs/heads/$branch"
echo "pushed $(ls "$work"/book/*.ipynb | wc -l) notebooks to $branch"
