"""Search-QA: answer a question with the help of a search tool."""
