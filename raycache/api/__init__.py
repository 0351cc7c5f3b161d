"""The OpenAI API as data and text: schema, chat templates, detokenisation. No web server."""
