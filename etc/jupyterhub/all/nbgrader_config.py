# Read by everybody's server on the hub.
c = get_config()
c.CourseDirectory.course_id = "course_llm"
c.Exchange.root = "/srv/nbgrader/exchange"
c.Authenticator.plugin_class = "nbgrader.auth.JupyterHubAuthPlugin"
